#include "host/table_parts.h"

#include <csignal>
#include <deque>
#include <filesystem>

#include <ATen/Functions.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <unistd.h>

#include "distrain/rows/row_snapshot.h"
#include "distrain/rpc/error.h"
#include "distrain/store/file.h"
#include "distrain/store/hash.h"
#include "distrain/wire/codec.h"

namespace distrain::job {

namespace {

using Put = std::function<void(uint64_t offset, std::span<const uint8_t> bytes)>;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kIndex = "table.safetensors.index.json";
constexpr uint64_t kMaxPiece = uint64_t{16} << 20;  // a row or a header may exceed kPieceBytes
constexpr size_t kInFlight = 4;  // pieces that a server sends to rank 0 at a time

std::string file_of(int64_t part, int64_t parts) {
  return fmt::format("{}{:05}-of-{:05}.safetensors", kTableFiles, part, parts);
}
// Returns the part's number in the name of a file, which ends the names of its tensors.
std::string suffix_of(const std::string& file) {
  return file.substr(std::string_view(kTableFiles).size(), 5);
}

rpc::To to(int rank) { return rpc::To(rank).without_deadline(); }

store::TensorInfo info_of(const std::string& table, const rows::RowColumn& column,
                          const std::string& suffix, int64_t rows) {
  std::vector<int64_t> shape = {rows};
  if (column.numbers > 0) shape.push_back(static_cast<int64_t>(column.numbers));
  const at::ScalarType dtype = column.name == "ids"       ? at::kLong
                               : column.name == "updates" ? at::kInt
                                                          : at::kFloat;
  return {table + "." + column.name + "." + suffix, dtype, std::move(shape)};
}

// Returns true if the float32 numbers are finite: if none has an exponent of ones.
bool all_finite(std::span<const std::byte> floats) {
  constexpr uint32_t kExponent = 0x7F800000;
  bool finite = true;
  for (size_t i = 0; i < floats.size(); i += sizeof(uint32_t)) {
    uint32_t bits;
    std::memcpy(&bits, floats.data() + i, sizeof bits);
    finite &= (bits & kExponent) != kExponent;
  }
  return finite;
}

uint64_t hash_of_manifest(const store::OpenFolder& folder) {
  const store::InputFile file(folder, kManifest);
  return store::content_hash(store::read_to_end<std::string>(file));
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
    auto sent = agent_.rpc_async<rpc::of_local<&TableParts::put>>(to(0), file_, offset, piece);
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

// Reads the rows of a table from a part.
class TableReader {
 public:
  TableReader(const store::SafetensorsFile& file, const std::string& suffix,
              const PartSource& source, const std::string& name, table::TableServer& server)
      : file_(file),
        source_(source),
        name_(name),
        store_(server.store(name)),
        columns_(rows::row_columns(store_.options(), server.rule(name))) {
    const auto ids = file.tensors().find(name + ".ids." + suffix);
    if (ids == file.tensors().end()) base::bad_data("no " + name + ".ids." + suffix);
    rows_ = ids->second.shape.empty() ? 0 : ids->second.shape[0];
    if (!source.with_states) std::erase_if(columns_, &rows::RowColumn::is_state);
    for (const rows::RowColumn& column : columns_) {
      const store::TensorInfo wanted = info_of(name, column, suffix, rows_);
      const auto found = file.tensors().find(wanted.name);
      if (found == file.tensors().end()) base::bad_data("no " + wanted.name);
      if (found->second.dtype != wanted.dtype || found->second.shape != wanted.shape) {
        base::bad_data(wanted.name + " has another shape or dtype");
      }
      infos_.push_back(found->second);
      bytes_of_row_ += column.bytes;
    }
  }

  size_t tensors() const { return infos_.size(); }

  void read() const {
    const int64_t most =
        std::max<int64_t>(1, static_cast<int64_t>(store::kPieceBytes / bytes_of_row_));
    std::vector<std::vector<uint8_t>> pieces(columns_.size());
    for (int64_t first = 0; first < rows_; first += most) {
      const auto count = static_cast<size_t>(std::min(most, rows_ - first));
      for (size_t i = 0; i < columns_.size(); ++i) {
        pieces[i].resize(count * columns_[i].bytes);
        file_.read_at(infos_[i].offset + static_cast<uint64_t>(first) * columns_[i].bytes,
                      pieces[i]);
      }
      for (size_t row = 0; row < count; ++row) restore(pieces, row);
    }
  }

 private:
  void restore(const std::vector<std::vector<uint8_t>>& pieces, size_t row) const {
    uint64_t id;
    std::memcpy(&id, pieces[0].data() + row * sizeof id, sizeof id);
    if (rows::hash_of_id(id) % static_cast<uint64_t>(source_.servers) !=
        static_cast<uint64_t>(source_.server)) {
      if (source_.is_own) base::bad_data(name_ + " has a row of another server");
      return;
    }
    store_.restore(id, [&](rows::Row& restored) {
      const rows::RowStoreOptions& options = store_.options();
      restored.updates = 0;
      restored.row_state = options.initial_state;
      std::fill_n(restored.value() + options.dim, options.state_floats, options.initial_state);
      for (size_t i = 0; i < columns_.size(); ++i) {
        const rows::RowColumn& column = columns_[i];
        std::memcpy(reinterpret_cast<std::byte*>(&restored) + column.offset,
                    pieces[i].data() + row * column.bytes, column.bytes);
      }
    });
  }
  const store::SafetensorsFile& file_;
  const PartSource& source_;
  const std::string& name_;
  rows::RowStore& store_;
  std::vector<rows::RowColumn> columns_;
  std::vector<store::TensorInfo> infos_;  // of `columns_`
  int64_t rows_ = 0;
  size_t bytes_of_row_ = 0;
};

// Returns the parts of a checkpoint that the server `server` of `servers` reads.
PartSource source_of(const Snapshot& snapshot, const std::vector<std::string>& tables,
                     size_t server, size_t servers, bool with_states) {
  const Json saved = snapshot.state.value("tables", Json());
  const Json parts = saved.is_object() ? saved.value("servers", Json()) : Json();
  if (!parts.is_number_unsigned() || parts == 0 || parts > 99'999)
    snapshot.refuse("it has no tables");
  const auto count = parts.get<int64_t>();
  const Json updates = saved.value("updates", Json());
  PartSource source{.path = std::filesystem::absolute(snapshot.path),
                    .is_own = count == static_cast<int64_t>(servers),
                    .server = static_cast<int>(server),
                    .servers = static_cast<int>(servers),
                    .with_states = with_states};
  for (int64_t part = 1; part <= count; ++part) {
    if (source.is_own && part != source.server + 1) continue;
    const std::string name = file_of(part, count);
    source.files[name] = snapshot.file(name.substr(0, name.rfind('.'))).size();
  }
  for (const std::string& table : tables) {
    const Json each = updates.is_object() ? updates.value(table, Json()) : Json();
    if (!each.is_array() || static_cast<int64_t>(each.size()) != count) {
      snapshot.refuse("it has no table " + table);
    }
    for (int64_t part = 0; part < count; ++part) {
      const Json& number = each[static_cast<size_t>(part)];
      if (!number.is_number_unsigned())
        snapshot.refuse("the updates of " + table + " are no number");
      if (source.is_own && part != source.server) continue;
      uint64_t& highest = source.updates[table];
      highest = std::max(highest, number.get<uint64_t>());
    }
  }
  if (updates.size() != tables.size()) snapshot.refuse("it has tables that the model has not");
  const store::Disk disk;
  const auto folder = store::OpenFolder::at(disk, source.path);
  source.manifest = folder ? hash_of_manifest(*folder) : 0;
  return source;
}

}  // namespace

struct TablePart::Held {
  struct Table {
    std::string name;
    std::vector<rows::RowColumn> columns;
    std::map<std::string, uint64_t> offsets{};  // of the columns in the file
    rows::RowSnapshot::Put put{};
    std::unique_ptr<rows::RowSnapshot> snapshot{};  // last, because it uses the members above
  };

  // May be called while another thread writes the tables or clears this object.
  void stop(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex);
    for (const auto& table : tables) table->snapshot->stop(error);
  }
  void clear() {
    std::vector<std::unique_ptr<Table>> cleared;  // destroyed without the lock
    const std::lock_guard lock(mutex);
    cleared.swap(tables);
  }

  std::mutex mutex;  // guards changes of `tables`, which only the writing thread clears
  std::vector<std::unique_ptr<Table>> tables;
};

TablePart::TablePart(rpc::Agent* agent, int64_t fail_at, std::shared_ptr<table::TableServer> here)
    : agent_(agent),
      fail_at_(fail_at),
      server_(here ? std::move(here) : agent->shared<table::TableServer>(&agent->lasting())) {}

TablePart::~TablePart() {
  drop();
  if (thread_.joinable()) thread_.join();
}

bool TablePart::sees(const std::string& path) const {
  const std::string folder = std::filesystem::path(path).parent_path();
  return ::access(path.c_str(), F_OK) == 0 && ::access(folder.c_str(), W_OK) == 0;
}

std::vector<uint64_t> TablePart::hold(const std::vector<std::string>& tables) {
  drop();
  const auto held = std::make_shared<Held>();
  std::vector<uint64_t> updates;
  for (const std::string& name : tables) {
    rows::RowStore& store = server_->store(name);
    auto table = std::make_unique<Held::Table>(
        Held::Table{name, rows::row_columns(store.options(), server_->rule(name))});
    table->snapshot =
        std::make_unique<rows::RowSnapshot>(store, rows::RowSnapshot::kLogBytes / tables.size());
    held->tables.push_back(std::move(table));
    updates.push_back(server_->updates_of(name));
  }
  const std::lock_guard lock(mutex_);
  held_ = held;
  return updates;
}

void TablePart::drop() {
  base::Future<void> idle;
  std::shared_ptr<Held> held;
  {
    const std::lock_guard lock(mutex_);
    held = std::exchange(held_, {});
    idle = idle_;
  }
  if (held) {
    held->stop(std::make_exception_ptr(
        base::Exception(base::ErrorKind::kCancelled, "the save of the tables was abandoned")));
  }
  idle.wait();
}

// Calls `work` on the thread, after earlier work has ended.
template <class T, class F>
base::Future<T> TablePart::run(F work) {
  const auto done = std::make_shared<base::Promise<T>>();
  const auto idle = std::make_shared<base::Promise<void>>();
  const std::lock_guard lock(mutex_);
  if (!idle_.done()) base::invalid("the tables of this rank are being saved or loaded");
  if (thread_.joinable()) thread_.join();
  thread_ = std::thread([done, idle, work = std::move(work)]() mutable {
    base::Result<typename base::Promise<T>::Stored> result =
        base::Error{base::ErrorKind::kInternal, "no result"};
    try {
      result = work();
    } catch (...) {
      result = rpc::error_in_flight(base::ErrorKind::kInternal);
    }
    work = nullptr;  // frees the snapshot
    idle->set();
    done->complete(std::move(result));
  });
  idle_ = idle->future();
  return done->future();
}

base::Future<WrittenPart> TablePart::write(const PartTarget& target) {
  std::shared_ptr<Held> held;
  {
    const std::lock_guard lock(mutex_);
    held = held_;
  }
  if (!held) base::invalid("there is no snapshot of the tables to write");
  ++saves_;
  return run<WrittenPart>(std::function<WrittenPart()>([this, held, target]() mutable {
    const auto ended = c10::make_scope_exit([&] {
      const std::lock_guard lock(mutex_);
      if (held_ == held) held_.reset();
      held.reset();
    });
    return write_held(*held, target);
  }));
}

// Called before each system call of a save.
void TablePart::make_system_call() {
  if (saves_ == 1 && ++calls_ == fail_at_) kill(getpid(), SIGKILL);
  if (!agent_) return;
  {
    const std::lock_guard lock(mutex_);
    if (base::seconds_since(told_) < 1) return;
    told_ = base::Clock::now();
  }
  try {
    static_cast<void>(agent_->rpc_async<rpc::of_local<&TableParts::note_progress>>(to(0)));
  } catch (const base::Exception&) {  // the job is ending
  }
}

WrittenPart TablePart::write_held(Held& held, const PartTarget& target) {
  std::vector<store::TensorInfo> infos;
  for (const auto& table : held.tables) {
    for (const rows::RowColumn& column : table->columns) {
      infos.push_back(info_of(table->name, column, suffix_of(target.file),
                              static_cast<int64_t>(table->snapshot->rows())));
    }
  }
  const std::string header = store::safetensors_header(infos);
  const store::Disk disk([this](const char*) { make_system_call(); });
  std::optional<store::OpenFolder> folder;
  std::optional<store::OutputFile> file;
  std::optional<Sender> sender;
  Put put;
  if (target.folder.empty()) {
    sender.emplace(*agent_, target.file);
    put = [&](auto... range) { sender->put(range...); };
  } else {
    folder = store::OpenFolder::at(disk, target.folder);
    if (!folder) store::Disk::fail("cannot open", target.folder);
    file.emplace(folder->create(target.file));
    put = [&](auto... range) { file->write_at(range...); };
  }
  put(0, {reinterpret_cast<const uint8_t*>(header.data()), header.size()});

  WrittenPart written;
  auto info = infos.begin();
  for (const auto& table : held.tables) {
    for (const rows::RowColumn& column : table->columns) {
      written.tensors.push_back(info->name);
      table->offsets[column.name] = (info++)->offset;
    }
    table->put = [&put, &target, its = table.get()](const rows::RowColumn& column, uint64_t first,
                                                    std::span<const std::byte> bytes) {
      if (column.name == "weight" && !all_finite(bytes)) {
        throw base::Exception(base::ErrorKind::kNotFinite,
                              fmt::format("{}.weight is not finite at step {}, so it was not "
                                          "saved: try a smaller --lr",
                                          its->name, target.step));
      }
      put(its->offsets.at(column.name) + first * column.bytes,
          {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    };
  }
  // If writing fails, updates of all tables must go on before the snapshots are destroyed.
  const auto ended = c10::make_scope_exit([&] { held.clear(); });
  for (const auto& table : held.tables) table->snapshot->begin(table->columns, table->put);
  for (const auto& table : held.tables) {
    table->snapshot->write();
    written.stalled_s += table->snapshot->stalled_s();
  }
  if (sender) sender->finish();
  if (file) written.sum = file->finish_with_sum();
  return written;
}

base::Future<void> TablePart::load(const PartSource& source) {
  return run<void>(std::function<base::Unit()>([this, source] {
    read(source);
    return base::Unit{};
  }));
}

void TablePart::read(const PartSource& source) {
  if (source.server < 0 || source.server >= source.servers) {
    wire::Reader::fail("the part of an unknown server");
  }
  const store::Disk disk;
  auto folder = store::OpenFolder::at(disk, source.path);
  try {
    if (folder && hash_of_manifest(*folder) != source.manifest) folder.reset();
  } catch (const base::Exception&) {
    folder.reset();  // rank 0's checkpoint is elsewhere
  }
  if (!folder && !agent_) base::bad_data(source.path + ": the checkpoint has disappeared");
  for (const auto& [name, size] : source.files) {
    store::ReadAt read_at;
    if (folder) {
      const auto file = std::make_shared<store::InputFile>(*folder, name);
      if (file->size() != size) base::bad_data(file->path() + ": its size has changed");
      read_at = [file](auto... range) { file->read_at(range...); };
    } else {
      read_at = [this, name = name](uint64_t offset, std::span<uint8_t> out) {
        const at::Tensor bytes = agent_->rpc_sync<rpc::of_local<&TableParts::get>>(
            to(0), name, offset, static_cast<uint64_t>(out.size()));
        if (bytes.scalar_type() != at::kByte || static_cast<size_t>(bytes.numel()) != out.size()) {
          base::bad_data(name + ": rank 0 has sent a piece of another size");
        }
        std::copy_n(bytes.contiguous().const_data_ptr<uint8_t>(), out.size(), out.begin());
      };
    }
    const store::SafetensorsFile file(source.path + "/" + name, size, read_at);
    const std::string suffix = suffix_of(name);
    size_t known = 0;
    store::naming_file(file.path(), [&] {
      for (const auto& [table, updates] : source.updates) {
        const TableReader reader(file, suffix, source, table, *server_);
        known += reader.tensors();
        reader.read();
      }
    });
    if (source.with_states && known != file.tensors().size()) {
      base::bad_data(file.path() + ": it has tensors that the tables have not");
    }
  }
  for (const auto& [table, updates] : source.updates) server_->updates_of(table) = updates;
}

TableParts::TableParts(rpc::Agent* agent, std::function<void()> alive)
    : agent_(agent), alive_(std::move(alive)) {}

void TableParts::expose(rpc::Agent& agent) {
  agent.expose<rpc::of_local<&TablePart::sees>>("job.sees_folder");
  agent.expose<rpc::of_local<&TablePart::hold>>("job.hold_tables");
  agent.expose<rpc::of_local<&TablePart::write>>("job.write_tables");
  agent.expose<rpc::of_local<&TablePart::drop>>("job.drop_tables");
  agent.expose<rpc::of_local<&TablePart::load>>("job.load_tables");
  agent.expose<rpc::of_local<&TableParts::put>>("job.put_piece");
  agent.expose<rpc::of_local<&TableParts::get>>("job.get_piece");
  agent.expose<rpc::of_local<&TableParts::note_progress>>("job.note_progress");
}

void TableParts::set(std::vector<std::string> tables, std::vector<int> servers,
                     const std::shared_ptr<table::TableServer>& here) {
  tables_ = std::move(tables);
  servers_ = std::move(servers);
  is_remote_.assign(servers_.size(), false);
  if (here) here_ = std::make_shared<TablePart>(nullptr, 0, here);
}

// Returns the future reply of a server.
template <auto Method, class... Args>
auto TableParts::call(size_t server, const Args&... args) {
  using Reply = decltype(agent_->rpc_async<rpc::of_local<Method>>(to(0), args...));
  using Returned = std::invoke_result_t<decltype(Method), TablePart&, const Args&...>;
  if (agent_) return agent_->rpc_async<rpc::of_local<Method>>(to(servers_[server]), args...);
  if constexpr (std::is_same_v<Returned, Reply>) {
    return std::invoke(Method, *here_, args...);
  } else if constexpr (std::is_void_v<Returned>) {
    std::invoke(Method, *here_, args...);
    return Reply::ready({});
  } else {
    return Reply::ready(std::invoke(Method, *here_, args...));
  }
}

std::string TableParts::name_of(size_t server) const {
  return agent_ ? agent_->worker(servers_[server]).name : "";
}

// Returns a server's reply. An error names the server.
template <class T>
T TableParts::result_of(size_t server, const base::Future<T>& reply) const {
  const auto& result = reply.wait_result();
  if (result.ok()) return static_cast<T>(result.value());
  base::Error error = result.error();
  if (agent_ && error.kind != base::ErrorKind::kPeerLost) {
    error.message = name_of(server) + ": " + error.message;
  }
  throw base::Exception(error);
}

std::vector<std::string> TableParts::find_remote(const std::string& path) {
  std::vector<base::Future<bool>> replies;
  std::vector<std::string> names;
  for (size_t k = 0; k < servers_.size(); ++k) replies.push_back(call<&TablePart::sees>(k, path));
  for (size_t k = 0; k < servers_.size(); ++k) {
    is_remote_[k] = !result_of(k, replies[k]);
    if (is_remote_[k]) names.push_back(name_of(k));
  }
  return names;
}

Json TableParts::hold() {
  std::vector<base::Future<std::vector<uint64_t>>> replies;
  for (size_t k = 0; k < servers_.size(); ++k) {
    replies.push_back(call<&TablePart::hold>(k, tables_));
  }
  Json updates = Json::object();
  for (size_t k = 0; k < servers_.size(); ++k) {
    const std::vector<uint64_t> numbers = result_of(k, replies[k]);
    for (size_t i = 0; i < tables_.size(); ++i) updates[tables_[i]].push_back(numbers.at(i));
  }
  return held_ = {{"servers", servers_.size()}, {"updates", updates}};
}

void TableParts::begin(store::Saving& saving, int64_t step) {
  const auto parts = std::ssize(servers_);
  for (size_t k = 0; k < servers_.size(); ++k) {
    const auto part = static_cast<int64_t>(k) + 1;
    PartTarget target{.file = file_of(part, parts), .step = step};
    if (is_remote_[k]) {
      const auto file = std::make_shared<store::OutputFile>(saving.create(target.file));
      const std::lock_guard lock(mutex_);
      files_[target.file] = file;
    } else {
      target.folder = std::filesystem::absolute(saving.path());
    }
    writing_.push_back(call<&TablePart::write>(k, target));
  }
}

double TableParts::finish(store::Saving& saving) {
  const auto parts = std::ssize(servers_);
  Json files = Json::object();
  double stalled_s = 0;
  for (size_t k = 0; k < servers_.size(); ++k) {
    const std::string name = file_of(static_cast<int64_t>(k) + 1, parts);
    const WrittenPart written = result_of(k, writing_[k]);
    if (is_remote_[k]) {
      std::shared_ptr<store::OutputFile> file;
      {
        const std::lock_guard lock(mutex_);
        file = files_.extract(name).mapped();
      }
      saving.add(name, *file);
    } else {
      saving.adopt(name, written.sum);
    }
    for (const std::string& tensor : written.tensors) files[tensor] = name;
    stalled_s = std::max(stalled_s, written.stalled_s);
  }
  writing_.clear();
  const std::string index = Json{{"metadata", held_}, {"weight_map", files}}.dump(2);
  store::OutputFile file = saving.create(kIndex);
  file.write({reinterpret_cast<const uint8_t*>(index.data()), index.size()});
  saving.add(kIndex, file);
  return stalled_s;
}

void TableParts::abandon() {
  std::vector<base::Future<void>> replies;
  for (size_t k = 0; k < servers_.size(); ++k) {
    try {
      replies.push_back(call<&TablePart::drop>(k));
    } catch (const base::Exception&) {  // the server is lost, or this rank is ending
    }
  }
  for (const auto& reply : replies) static_cast<void>(reply.wait_result());
  for (const auto& reply : writing_) static_cast<void>(reply.wait_result());
  writing_.clear();
  const std::lock_guard lock(mutex_);
  files_.clear();
}

void TableParts::put(const std::string& file, uint64_t offset, const at::Tensor& bytes) {
  alive_();
  std::shared_ptr<store::OutputFile> out;
  {
    const std::lock_guard lock(mutex_);
    const auto it = files_.find(file);
    if (it != files_.end()) out = it->second;
  }
  if (!out) throw base::Exception(base::ErrorKind::kCancelled, file + ": its save has ended");
  const at::Tensor flat = bytes.contiguous();
  out->write_at(offset, {static_cast<const uint8_t*>(flat.const_data_ptr()), flat.nbytes()});
}

void TableParts::load(const Snapshot& snapshot, bool with_states) {
  std::vector<PartSource> sources;  // made first, so that no server loads if one cannot
  for (size_t k = 0; k < servers_.size(); ++k) {
    sources.push_back(source_of(snapshot, tables_, k, servers_.size(), with_states));
  }
  {
    const std::lock_guard lock(mutex_);
    loading_ = &snapshot;
  }
  const auto ended = c10::make_scope_exit([&] {
    const std::lock_guard lock(mutex_);
    loading_ = nullptr;
  });
  std::vector<base::Future<void>> replies;
  for (size_t k = 0; k < servers_.size(); ++k) {
    replies.push_back(call<&TablePart::load>(k, sources[k]));
  }
  for (const auto& reply : replies) static_cast<void>(reply.wait_result());
  for (size_t k = 0; k < servers_.size(); ++k) result_of(k, replies[k]);
}

at::Tensor TableParts::get(const std::string& file, uint64_t offset, uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  if (!loading_) base::invalid("no tables are being loaded");
  const store::SafetensorsFile& stored = loading_->file(file.substr(0, file.rfind('.')));
  if (bytes > kMaxPiece || offset > stored.size() || bytes > stored.size() - offset) {
    base::invalid(file + " has no such piece");
  }
  const at::Tensor piece = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  stored.read_at(offset, {piece.mutable_data_ptr<uint8_t>(), bytes});
  return piece;
}

void load_tables(const Snapshot& snapshot, std::vector<std::string> tables,
                 const std::shared_ptr<table::TableServer>& server) {
  TableParts parts(nullptr);
  parts.set(std::move(tables), {0}, server);
  parts.load(snapshot, /*with_states=*/false);
}

}  // namespace distrain::job
