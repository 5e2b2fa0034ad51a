#include "host/table_part.h"

#include <csignal>
#include <deque>

#include <ATen/Functions.h>
#include <sys/resource.h>
#include <unistd.h>

#include "distrain/rpc/error.h"
#include "distrain/store/checkpoint_store.h"
#include "distrain/store/file.h"
#include "distrain/wire/codec.h"
#include "host/table_parts.h"

namespace distrain::job {

namespace {

using Put = std::function<void(uint64_t offset, std::span<const uint8_t> bytes)>;

constexpr size_t kInFlight = 4;  // pieces that a server sends to rank 0 at a time
// Niceness of the thread that saves, because training needs the cores. A nicer thread would wait
// for a core while it holds a lock.
constexpr int kNiceness = 5;

const rpc::To& rank_0() {
  static const rpc::To kTo = rpc::To(0).without_deadline();
  return kTo;
}

// Returns the part's number in the name of a file, which ends the names of its tensors.
std::string suffix_of(const std::string& file) {
  return file.substr(std::string_view(kTableFiles).size(), 5);
}

store::TensorInfo info_of(const std::string& table, const rows::RowColumn& column,
                          const std::string& suffix, int64_t rows) {
  std::vector<int64_t> shape = {rows};
  if (column.numbers > 0) shape.push_back(static_cast<int64_t>(column.numbers));
  const at::ScalarType dtype = column.name == "ids"       ? at::kLong
                               : column.name == "updates" ? at::kInt
                                                          : at::kFloat;
  return {table + "." + column.name + "." + suffix, dtype, std::move(shape)};
}

// Sends pieces of a file to rank 0. Thread-safe.
class Sender {
 public:
  Sender(rpc::Agent& agent, std::string file) : agent_(agent), file_(std::move(file)) {}
  ~Sender() {  // when a save has failed, no piece may arrive during the next one
    for (const auto& each : sent_) static_cast<void>(each.wait_result());
  }

  void put(uint64_t offset, std::span<const uint8_t> bytes) {
    const at::Tensor piece = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::ranges::copy(bytes, piece.mutable_data_ptr<uint8_t>());
    auto sent = agent_.rpc_async<rpc::of_local<&TableParts::put>>(rank_0(), file_, offset, piece);
    std::optional<base::Future<void>> oldest;
    {
      const std::lock_guard lock(mutex_);
      sent_.push_back(std::move(sent));
      if (sent_.size() <= kInFlight) return;
      oldest = std::move(sent_.front());
      sent_.pop_front();
    }
    oldest->wait();
  }
  void finish() {
    for (const auto& each : sent_) each.wait();
  }

 private:
  rpc::Agent& agent_;
  const std::string file_;
  std::mutex mutex_;
  std::deque<base::Future<void>> sent_;
};

// Finds the tensors of `columns` of the table `name` in a part. Throws if one is missing or
// differs.
std::vector<store::TensorInfo> find_columns(const store::SafetensorsFile& file,
                                            const std::string& suffix, const std::string& name,
                                            const std::vector<rows::RowColumn>& columns) {
  const auto find = [&file](const std::string& tensor) {
    const auto found = file.tensors().find(tensor);
    if (found == file.tensors().end()) base::bad_data("no " + tensor);
    return found->second;
  };
  const store::TensorInfo ids = find(name + ".ids." + suffix);
  const int64_t rows = ids.shape.empty() ? 0 : ids.shape[0];
  std::vector<store::TensorInfo> infos;
  for (const rows::RowColumn& column : columns) {
    const store::TensorInfo wanted = info_of(name, column, suffix, rows);
    infos.push_back(find(wanted.name));
    if (infos.back().dtype != wanted.dtype || infos.back().shape != wanted.shape) {
      base::bad_data(wanted.name + " has another shape or dtype");
    }
  }
  return infos;
}

// Reads the rows of the table `name` from a part. Returns the number of the table's tensors.
size_t read_table(const store::SafetensorsFile& file, const std::string& suffix,
                  const PartSource& source, const std::string& name, table::TableServer& server) {
  rows::RowStore& store = server.store(name);
  const rows::RowStoreOptions& options = store.options();
  std::vector<rows::RowColumn> columns = rows::row_columns(options, server.rule(name));
  if (!source.with_states) std::erase_if(columns, &rows::RowColumn::is_state);
  const std::vector<store::TensorInfo> infos = find_columns(file, suffix, name, columns);
  std::vector<std::vector<uint8_t>> pieces(columns.size());
  const auto restore = [&](size_t row) {
    uint64_t id;
    std::memcpy(&id, pieces[0].data() + row * sizeof id, sizeof id);
    if (rows::hash_of_id(id) % static_cast<uint64_t>(source.servers) !=
        static_cast<uint64_t>(source.server)) {
      if (source.is_own) base::bad_data(name + " has a row of another server");
      return;
    }
    store.restore(id, [&](rows::Row& restored) {
      restored.updates = 0;
      restored.row_state = options.initial_state;
      std::fill_n(restored.value() + options.dim, options.state_floats, options.initial_state);
      for (size_t i = 0; i < columns.size(); ++i) {
        std::memcpy(reinterpret_cast<std::byte*>(&restored) + columns[i].offset,
                    pieces[i].data() + row * columns[i].bytes, columns[i].bytes);
      }
    });
  };
  size_t bytes_of_row = 0;
  for (const rows::RowColumn& column : columns) bytes_of_row += column.bytes;
  const size_t most = std::max<size_t>(1, store::kPieceBytes / bytes_of_row);
  const auto rows = static_cast<size_t>(infos[0].shape[0]);
  for (size_t first = 0; first < rows; first += most) {
    const size_t count = std::min(most, rows - first);
    for (size_t i = 0; i < columns.size(); ++i) {
      pieces[i].resize(count * columns[i].bytes);
      file.read_at(infos[i].offset + first * columns[i].bytes, pieces[i]);
    }
    for (size_t row = 0; row < count; ++row) restore(row);
  }
  return infos.size();
}

// Returns the file of this name in `folder` if it begins with the nonce.
std::optional<store::OutputFile> find_file(const std::optional<store::OpenFolder>& folder,
                                           const PartTarget& target) {
  try {
    uint64_t nonce = 0;
    if (!folder) return std::nullopt;
    store::InputFile(*folder, target.file)
        .read_at(0, {reinterpret_cast<uint8_t*>(&nonce), sizeof nonce});
    if (nonce == target.nonce) return folder->reopen(target.file);
  } catch (const base::Exception&) {  // rank 0's file is elsewhere, or may not be written
  }
  return std::nullopt;
}

}  // namespace

void read_tables(table::TableServer& server, const PartSource& source, const OpenPart& open) {
  if (source.server < 0 || source.server >= source.servers) {
    wire::Reader::fail("the part of an unknown server");
  }
  for (const auto& [name, size] : source.files) {
    const store::SafetensorsFile file = open(name);
    size_t known = 0;
    store::naming_file(file.path(), [&, name = name] {
      for (const auto& [table, updates] : source.updates) {
        known += read_table(file, suffix_of(name), source, table, server);
      }
    });
    if (source.with_states && known != file.tensors().size()) {
      base::bad_data(file.path() + ": it has tensors that the tables have not");
    }
  }
  for (const auto& [table, updates] : source.updates) server.updates_of(table) = updates;
}

struct TablePart::Save {
  // Calls `sleep` with the time that `pace` computes.
  void rest(const std::function<void(base::Duration)>& sleep) {
    uint64_t logged = 0;
    bool is_filling = false;
    for (const auto& table : tables) {
      logged += table->logged();
      is_filling = is_filling || table->is_filling();
    }
    const base::Duration rest = pace.rest(base::Clock::now(), logged, is_filling);
    if (rest > base::Duration::zero()) sleep(rest);
    pace.resume(base::Clock::now());
  }

  PartTarget target;
  std::vector<std::unique_ptr<rows::RowSnapshot>> tables{};
  std::vector<store::TensorInfo> infos{};  // of the columns of all tables
  std::string header{};
  Pace pace{base::Clock::now()};
};

TablePart::TablePart(rpc::Agent* agent, EventSink& sink, Options options)
    : agent_(agent),
      sink_(sink),
      options_(std::move(options)),
      server_(options_.server ? options_.server
                              : agent->shared<table::TableServer>(&agent->lasting())),
      thread_("tables", [] { setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness); }) {
}

// Calls `work` on the thread, after earlier work has ended. The reply is `cancelled` if the thread
// cannot be started.
auto TablePart::run(auto work) {
  return base::Future<void>::ready({}).then(thread_, [work = std::move(work)]() mutable {
    try {
      return work();
    } catch (...) {
      throw base::Exception(rpc::error_in_flight(base::ErrorKind::kInternal));
    }
  });
}

BegunPart TablePart::begin(const PartTarget& target) {
  if (target.tables.empty() || !target.file.starts_with(kTableFiles) ||
      target.file.find('/') != std::string::npos) {
    wire::Reader::fail("a save of no tables, or to another file");
  }
  drop();
  BegunPart begun;
  const auto save = std::make_shared<Save>(Save{target});
  for (const std::string& name : target.tables) {
    const auto& table = save->tables.emplace_back(
        std::make_unique<rows::RowSnapshot>(server_->store(name), server_->rule(name),
                                            rows::RowSnapshot::kLogBytes / target.tables.size()));
    for (const rows::RowColumn& column : table->columns()) {
      save->infos.push_back(
          info_of(name, column, suffix_of(target.file), static_cast<int64_t>(table->rows())));
    }
    begun.updates.push_back(server_->updates_of(name));
  }
  save->header = store::safetensors_header(save->infos);
  begun.bytes = save->infos.back().offset + save->infos.back().bytes;
  ++saves_;
  const std::lock_guard lock(mutex_);
  is_dropped_ = false;
  save_ = save;
  // Ends the snapshots before the reply, so that others may begin.
  written_ = run([this, own = save]() mutable { return write(*std::exchange(own, {})); });
  const bool is_over = written_.done() && !written_.wait_result().ok();
  if (is_over && written_.wait_result().error().kind == base::ErrorKind::kCancelled) {
    throw base::Exception(base::ErrorKind::kResources, "no thread to save the tables");
  }
  return begun;
}

void TablePart::drop() {
  is_dropped_ = true;
  {
    const std::lock_guard lock(mutex_);
    if (const auto save = save_.lock()) {
      for (const auto& table : save->tables) table->stop();
    }
  }
  static_cast<void>(written().wait_result());
}

// Called before each system call of a save. Tells rank 0 each second that the save makes progress.
void TablePart::make_system_call() {
  if (saves_ == 1 && ++calls_ == options_.fail_at) kill(getpid(), SIGKILL);
  sink_.saving();
  if (!agent_ || base::seconds_since(told_rank_0_) < 1) return;
  told_rank_0_ = base::Clock::now();
  try {
    static_cast<void>(agent_->rpc_async<rpc::of_local<&TableParts::note_progress>>(rank_0()));
  } catch (const base::Exception&) {  // this rank is ending
  }
}

WrittenPart TablePart::write(Save& save) {
  const PartTarget& target = save.target;
  const store::Disk disk([this, &save](const char* name) {
    save.rest(options_.sleep);
    make_system_call();
    if (name == std::string_view("pread")) check_not_dropped();
  });
  const auto folder = store::OpenFolder::at(disk, target.folder);
  std::optional<store::OutputFile> file = options_.sends ? std::nullopt : find_file(folder, target);
  if (!file && !agent_) store::Disk::fail("cannot open", target.folder);
  std::optional<Sender> sender;
  if (!file) sender.emplace(*agent_, target.file);
  const Put put = [&](auto... range) { file ? file->write_at(range...) : sender->put(range...); };
  put(0, {reinterpret_cast<const uint8_t*>(save.header.data()), save.header.size()});

  std::vector<rows::RowSnapshot::Put> puts;
  size_t first_info = 0;
  for (size_t i = 0; i < save.tables.size(); ++i) {
    const std::vector<rows::RowColumn>& columns = save.tables[i]->columns();
    puts.push_back(
        [&, i, infos = std::span(save.infos).subspan(first_info)](
            const rows::RowColumn& column, uint64_t first, std::span<const std::byte> bytes) {
          check_not_dropped();
          if (column.name == "weight") {
            auto* const floats = const_cast<std::byte*>(bytes.data());
            const auto count = static_cast<int64_t>(bytes.size() / sizeof(float));
            check_finite(target.tables[i] + ".weight", at::from_blob(floats, {count}, at::kFloat),
                         target.step);
          }
          const auto number = static_cast<size_t>(&column - save.tables[i]->columns().data());
          put(infos[number].offset + first * column.bytes,
              {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
        });
    first_info += columns.size();
  }
  WrittenPart written;
  for (size_t i = 0; i < save.tables.size(); ++i) {
    while (save.tables[i]->write_next(puts[i])) {
      // Updates of the other tables fill their logs.
      for (size_t other = i + 1; other < save.tables.size(); ++other) {
        save.tables[other]->empty_log(puts[other]);
      }
    }
    written.stalled_s += save.tables[i]->stalled_s();
  }
  check_not_dropped();  // drop() stops the snapshots, which then lack rows
  if (sender) sender->finish();
  if (file) written.sum = file->finish_with_sum();
  return written;
}

base::Future<void> TablePart::load(const PartSource& source) {
  return run([this, source] {
    read_tables(*server_, source, [&](const std::string& name) { return open(source, name); });
  });
}

// Opens a part of rank 0's checkpoint. If this process does not see the checkpoint, or if another
// job removes it, reads pieces of the file that rank 0 has open.
store::SafetensorsFile TablePart::open(const PartSource& source, const std::string& name) const {
  const uint64_t size = source.files.at(name);
  const std::string path = source.path + "/" + name;
  try {
    const store::Disk disk;
    const auto folder = store::OpenFolder::at(disk, source.path);
    if (folder &&
        store::CheckpointStore::load(source.path, store::Depth::kManifest).hash == source.hash) {
      const auto file = std::make_shared<store::InputFile>(*folder, name);
      const auto read = [file](auto... range) { file->read_at(range...); };
      if (file->size() == size) return {path, size, read};
    }
  } catch (const base::Exception&) {
  }
  return {
      path, size, [this, name](uint64_t offset, std::span<uint8_t> out) {
        const at::Tensor bytes = agent_->rpc_sync<rpc::of_local<&TableParts::get>>(
            rank_0(), name, offset, static_cast<uint64_t>(out.size()));
        if (bytes.scalar_type() != at::kByte || static_cast<size_t>(bytes.numel()) != out.size()) {
          base::bad_data(name + ": rank 0 has sent a piece of another size");
        }
        std::copy_n(bytes.contiguous().const_data_ptr<uint8_t>(), out.size(), out.begin());
      }};
}

}  // namespace distrain::job
