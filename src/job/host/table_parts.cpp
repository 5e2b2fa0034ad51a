#include "host/table_parts.h"

#include <filesystem>
#include <random>

#include <ATen/Functions.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/base/thread_state.h"

namespace distrain::job {

namespace {

constexpr const char* kIndex = "table.safetensors.index.json";
constexpr uint64_t kMaxPiece = uint64_t{16} << 20;  // a row or a header may exceed kPieceBytes

std::string file_of(int64_t part, int64_t parts) {
  return fmt::format("{}{:05}-of-{:05}.safetensors", kTableFiles, part, parts);
}
std::string stem_of(const std::string& file) { return file.substr(0, file.rfind('.')); }

// Returns the parts of a checkpoint that the server `server` of `servers` reads.
PartSource source_of(const Snapshot& snapshot, const std::vector<std::string>& tables,
                     size_t server, size_t servers, bool with_states) {
  const auto expect = [&](bool is_good, const std::string& otherwise) {
    if (!is_good) snapshot.refuse(otherwise);
  };
  const Json saved = snapshot.state.value("tables", Json());
  const Json parts = saved.is_object() ? saved.value("servers", Json()) : Json();
  expect(parts.is_number_unsigned() && parts != 0 && parts <= 99'999, "it has no tables");
  const auto count = parts.get<int64_t>();
  const Json updates = saved.value("updates", Json());
  PartSource source{.path = std::filesystem::absolute(snapshot.path),
                    .hash = snapshot.hash,
                    .is_own = count == static_cast<int64_t>(servers),
                    .server = static_cast<int>(server),
                    .servers = static_cast<int>(servers),
                    .with_states = with_states};
  for (int64_t part = 1; part <= count; ++part) {
    if (source.is_own && part != source.server + 1) continue;
    const std::string name = file_of(part, count);
    source.files[name] = snapshot.file(stem_of(name)).size();
  }
  for (const std::string& table : tables) {
    const Json each = updates.is_object() ? updates.value(table, Json()) : Json();
    expect(each.is_array() && std::ssize(each) == count, "it has no table " + table);
    for (int64_t part = 0; part < count; ++part) {
      const Json& number = each[static_cast<size_t>(part)];
      expect(number.is_number_unsigned(), "the updates of " + table + " are no number");
      if (source.is_own && part != source.server) continue;
      uint64_t& highest = source.updates[table];
      highest = std::max(highest, number.get<uint64_t>());
    }
  }
  expect(updates.size() == tables.size(), "it has tables that the model has not");
  return source;
}

template <class T>
bool has_failed(const base::Future<T>& reply) {
  return reply.done() && !reply.wait_result().ok();
}

}  // namespace

void TableParts::expose(rpc::Agent& agent) {
  agent.expose<rpc::of_local<&TablePart::begin>>("job.begin_tables");
  agent.expose<rpc::of_local<&TablePart::written>>("job.await_tables");
  agent.expose<rpc::of_local<&TablePart::drop>>("job.drop_tables");
  agent.expose<rpc::of_local<&TablePart::load>>("job.load_tables");
  agent.expose<rpc::of_local<&TableParts::note_progress>>("job.note_progress");
  agent.expose<rpc::of_local<&TableParts::put>>("job.put_piece");
  agent.expose<rpc::of_local<&TableParts::get>>("job.get_piece");
}

// Returns the future reply of a server.
template <auto Method, class... Args>
auto TableParts::call(size_t server, const Args&... args) {
  using Reply = decltype(agent_->rpc_async<rpc::of_local<Method>>(0, args...));
  using Returned = std::invoke_result_t<decltype(Method), TablePart&, const Args&...>;
  if (agent_) {
    const rpc::To to = rpc::To(servers_[server]).without_deadline();
    return agent_->rpc_async<rpc::of_local<Method>>(to, args...);
  }
  if constexpr (std::is_same_v<Returned, Reply>) {
    return std::invoke(Method, *here_, args...);
  } else if constexpr (std::is_void_v<Returned>) {
    std::invoke(Method, *here_, args...);
    return Reply::ready({});
  } else {
    return Reply::ready(std::invoke(Method, *here_, args...));
  }
}

// Throws the error of a reply that has failed. It names the server. The loss of a server comes
// first, because it may cause other errors.
template <class T>
void TableParts::check(const std::vector<base::Future<T>>& replies) const {
  for (const bool is_loss : {true, false}) {
    for (size_t k = 0; k < replies.size(); ++k) {
      if (!has_failed(replies[k])) continue;
      base::Error error = replies[k].wait_result().error();
      if ((error.kind == base::ErrorKind::kPeerLost) != is_loss) continue;
      if (agent_ && !is_loss) error.message = name_of(k) + ": " + error.message;
      throw base::Exception(error);
    }
  }
}

Json TableParts::begin(store::Saving& saving, int64_t step) {
  const auto servers = static_cast<int64_t>(servers_.size());
  std::vector<std::shared_ptr<Part>> parts;
  PartTarget target{.folder = std::filesystem::absolute(saving.path()), .step = step};
  target.nonce = uint64_t{std::random_device()()} << 32 | std::random_device()();
  target.tables = tables_;
  for (int64_t part = 1; part <= servers; ++part) {
    const std::string file = file_of(part, servers);
    parts.push_back(std::make_shared<Part>(Part{file, saving.create(file)}));
    parts.back()->output.write_at(
        0, {reinterpret_cast<const uint8_t*>(&target.nonce), sizeof target.nonce});
    parts.back()->output.sync();  // so that servers on other machines (NFS) see the nonce
  }
  {
    const std::lock_guard lock(mutex_);
    parts_ = parts;
  }
  std::vector<base::Future<BegunPart>> replies;
  const auto await = [&] {
    for (const auto& reply : replies) static_cast<void>(reply.wait_result());
  };
  try {
    for (size_t k = 0; k < servers_.size(); ++k) {
      target.file = parts[k]->file;
      replies.push_back(call<&TablePart::begin>(k, target));
    }
  } catch (...) {
    await();  // so that abandon() comes after begin() on each server
    throw;
  }
  await();
  check(replies);
  Json updates = Json::object();
  for (size_t k = 0; k < servers_.size(); ++k) {
    const BegunPart begun = replies[k].wait();
    parts[k]->bytes.set(begun.bytes);
    for (size_t i = 0; i < tables_.size(); ++i) updates[tables_[i]].push_back(begun.updates.at(i));
    writing_.push_back(call<&TablePart::written>(k));
  }
  return begun_ = {{"servers", servers}, {"updates", updates}};
}

double TableParts::finish(store::Saving& saving) {
  const auto is_over = [](const auto& reply) { return reply.done(); };
  while (std::ranges::none_of(writing_, has_failed<WrittenPart>) &&
         !std::ranges::all_of(writing_, is_over)) {
    const auto running = std::ranges::find_if_not(writing_, is_over);
    const auto soon = base::Clock::now() + std::chrono::milliseconds(50);
    if (running != writing_.end()) running->wait_until(soon);
  }
  check(writing_);
  std::vector<std::shared_ptr<Part>> parts;
  {
    const std::lock_guard lock(mutex_);
    parts.swap(parts_);
  }
  Json tensors = Json::object();
  std::vector<std::string> senders;
  double stalled_s = 0;
  for (size_t k = 0; k < parts.size(); ++k) {
    const WrittenPart written = writing_[k].wait();
    const std::string& file = parts[k]->file;
    const store::SafetensorsFile found = saving.open(file);
    if (found.size() != parts[k]->bytes.future().wait()) {
      base::bad_data(found.path() + " has another size than " +
                     (agent_ ? name_of(k) : "the server") + " announced");
    }
    for (const auto& [tensor, info] : found.tensors()) tensors[tensor] = file;
    if (written.sum.bytes > 0) {
      saving.adopt(file, written.sum);
    } else {
      saving.add(file, parts[k]->output);
      senders.push_back(name_of(k));
    }
    stalled_s = std::max(stalled_s, written.stalled_s);
  }
  writing_.clear();
  if (!senders.empty() && !std::exchange(has_warned_, true)) {
    sink_.warn(base::ErrorKind::kInvalid,
               fmt::format("the folder {} of rank 0 is not seen by {}, so their parts of each "
                           "checkpoint are sent to rank 0",
                           std::filesystem::path(saving.path()).parent_path().string(),
                           fmt::join(senders, ", ")));
  }
  const std::string index = Json{{"metadata", begun_}, {"weight_map", tensors}}.dump(2);
  store::OutputFile file = saving.create(kIndex);
  file.write({reinterpret_cast<const uint8_t*>(index.data()), index.size()});
  saving.add(kIndex, file);
  return stalled_s;
}

void TableParts::abandon() {
  {
    const std::lock_guard lock(mutex_);
    for (const auto& part : parts_) part->bytes.fail({base::ErrorKind::kCancelled, "abandoned"});
    parts_.clear();
  }
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
}

void TableParts::put(const std::string& file, uint64_t offset, const at::Tensor& bytes) {
  sink_.saving();
  std::shared_ptr<Part> part;
  {
    const std::lock_guard lock(mutex_);
    const auto it = std::ranges::find(parts_, file, [](const auto& each) { return each->file; });
    if (it != parts_.end()) part = *it;
  }
  if (!part) throw base::Exception(base::ErrorKind::kCancelled, file + ": its save has ended");
  const at::Tensor flat = bytes.contiguous();
  const uint64_t size = part->bytes.future().wait();
  if (offset > size || flat.nbytes() > size - offset) base::invalid(file + " has no such piece");
  const base::BlockingScope waits;  // for the disk
  part->output.write_at(offset,
                        {static_cast<const uint8_t*>(flat.const_data_ptr()), flat.nbytes()});
}

void TableParts::load(const Snapshot& snapshot, bool with_states) {
  if (server_) return load_tables(snapshot, tables_, *server_, with_states);
  std::vector<PartSource> sources;  // made first, so that no server loads if one cannot
  for (size_t k = 0; k < servers_.size(); ++k) {
    sources.push_back(source_of(snapshot, tables_, k, servers_.size(), with_states));
  }
  const auto set_loading = [this](const Snapshot* loading) {
    const std::lock_guard lock(mutex_);
    loading_ = loading;
  };
  set_loading(&snapshot);
  const auto ended = c10::make_scope_exit([&] { set_loading(nullptr); });
  std::vector<base::Future<void>> replies;
  for (size_t k = 0; k < servers_.size(); ++k) {
    replies.push_back(call<&TablePart::load>(k, sources[k]));
  }
  for (const auto& reply : replies) static_cast<void>(reply.wait_result());
  check(replies);
}

at::Tensor TableParts::get(const std::string& file, uint64_t offset, uint64_t bytes) const {
  const auto stored = [&] {
    const std::lock_guard lock(mutex_);
    if (!loading_) base::invalid("no tables are being loaded");
    return loading_->file(stem_of(file));  // a copy, because load() may end
  }();
  if (bytes > kMaxPiece || offset > stored.size() || bytes > stored.size() - offset) {
    base::invalid(file + " has no such piece");
  }
  const base::BlockingScope waits;  // for the disk
  const at::Tensor piece = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  stored.read_at(offset, {piece.mutable_data_ptr<uint8_t>(), bytes});
  return piece;
}

void load_tables(const Snapshot& snapshot, const std::vector<std::string>& tables,
                 table::TableServer& server, bool with_states) {
  read_tables(server, source_of(snapshot, tables, 0, 1, with_states),
              [&](const std::string& name) { return snapshot.file(stem_of(name)); });
}

}  // namespace distrain::job
