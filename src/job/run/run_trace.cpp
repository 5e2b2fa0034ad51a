#include "run/run_trace.h"

#include <filesystem>
#include <iterator>
#include <limits>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/process.h"
#include "distrain/store/disk.h"

namespace distrain::job {

namespace {

using base::RankTrace;
using base::TraceEvent;
using base::TraceTrack;
using Kind = TraceEvent::Kind;

constexpr size_t kBufferBytes = size_t{1} << 20;

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Writes trace events. Slices ("X") of a thread must nest or not overlap. A flow arrow's endpoint,
// "s" or "f" (with bp "e"), belongs to the slice that is open on its thread at its time. Events of
// equal time count in file order, so each endpoint is written directly after its slice.
class Writer {
 public:
  Writer(store::OutputFile& file, const std::vector<RankTrace>& ranks) : file_(file) {
    text_.reserve(kBufferBytes + (size_t{64} << 10));
    for_each_event(ranks, [this](const TraceEvent& event) {
      first_ = std::min(first_, event.start);
      if (event.kind == Kind::kFlowOut) flows_.push_back({event.id, event.value, false});
    });
    std::ranges::sort(flows_, {}, &Flow::id);
    for_each_event(ranks, [this](const TraceEvent& event) {
      if (event.kind != Kind::kFlowIn) return;
      if (Flow* const flow = find_flow(event.id)) flow->whole = flow->left <= event.start;
    });
  }

  void write(const std::vector<RankTrace>& ranks) {
    text_ += "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
    // Thread numbers start above all process numbers, because a viewer takes a thread with the
    // number of its process for the main thread.
    thread_ = static_cast<int64_t>(ranks.size());
    for (const RankTrace& rank : ranks) {
      rank_ = rank.rank;
      metadata("process_name", 0, "name", quoted(rank.role));
      metadata("process_sort_index", 0, "sort_index", std::to_string(rank_));
      for (const TraceTrack& track : rank.tracks) {
        ++thread_;
        metadata("thread_name", thread_, "name", quoted(track.name));
        metadata("thread_sort_index", thread_, "sort_index", std::to_string(thread_));
        write(track);
      }
    }
    text_ += "\n]}\n";
    flush();
  }

 private:
  struct Flow {
    uint64_t id = 0;
    int64_t left = 0;
    bool whole = false;
  };

  Flow* find_flow(uint64_t id) {
    const auto it = std::ranges::lower_bound(flows_, id, {}, &Flow::id);
    return it != flows_.end() && it->id == id ? &*it : nullptr;
  }

  static void for_each_event(const std::vector<RankTrace>& ranks, auto function) {
    for (const RankTrace& rank : ranks) {
      for (const TraceTrack& track : rank.tracks) std::ranges::for_each(track.events, function);
    }
  }

  template <class... Args>
  void put(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Args>(args)...);
  }

  void metadata(const char* what, int64_t thread, const char* key, const std::string& value) {
    begin_line();
    put(R"({{"ph":"M","pid":{},"tid":{},"name":"{}","args":{{"{}":{}}}}})", rank_, thread, what,
        key, value);
  }

  void write(const TraceTrack& track) {
    std::vector<const TraceEvent*> events;
    events.reserve(track.events.size());
    for (const TraceEvent& event : track.events) events.push_back(&event);
    std::ranges::stable_sort(
        events, {}, [](const TraceEvent* event) { return std::pair(event->start, -event->end); });
    for (const TraceEvent* event : events) {
      if (event->kind == Kind::kAsync) {
        common("b", *event, event->start);
        put(R"(,"id":"{}"{}}})", event->id, arguments(*event));
        common("e", *event, event->end);
        put(R"(,"id":"{}"}})", event->id);
        continue;
      }
      common("X", *event, event->start);
      const int64_t ns = event->end - event->start;
      put(R"(,"dur":{}.{:03}{}}})", ns / 1000, ns % 1000, arguments(*event));
      if (event->kind == Kind::kSlice) continue;
      const Flow* const flow = find_flow(event->id);
      if (!flow || !flow->whole) continue;
      if (event->kind == Kind::kFlowOut) {
        place("s", event->value);
      } else {
        place(R"(f","bp":"e)", event->start);
      }
      put(R"(,"name":"call","cat":"rpc","id":{}}})", event->id);
    }
  }

  void common(const char* phase, const TraceEvent& event, int64_t time) {
    place(phase, time);
    put(R"(,"name":{},"cat":{})", text_of(event.name), text_of(event.category));
  }

  void place(const char* phase, int64_t time) {
    begin_line();
    const int64_t ns = time - first_;
    put(R"({{"ph":"{}","pid":{},"tid":{},"ts":{}.{:03})", phase, rank_, thread_, ns / 1000,
        ns % 1000);
  }

  std::string arguments(const TraceEvent& event) {
    if (!event.key) return {};
    return fmt::format(R"(,"args":{{{}:{}}})", text_of(event.key), event.value);
  }

  // Returns `text` in quotes. Caches the result by address, because there are few different texts.
  const std::string& text_of(const char* text) {
    std::string& known = texts_[text];
    if (known.empty()) known = quoted(text);
    return known;
  }

  void begin_line() {
    if (text_.size() > kBufferBytes) flush();
    if (lines_++ > 0) text_ += ",\n";
  }

  void flush() {
    file_.write({reinterpret_cast<const uint8_t*>(text_.data()), text_.size()});
    text_.clear();
  }

  store::OutputFile& file_;
  std::string text_;
  int rank_ = 0;
  int64_t thread_ = 0;
  int64_t first_ = std::numeric_limits<int64_t>::max();  // start of the first event
  uint64_t lines_ = 0;
  std::vector<Flow> flows_;  // sorted by id; a map of millions would take three times the memory
  std::unordered_map<const char*, std::string> texts_;
};

// Resolves symbolic links in `path`, even if the target does not exist, as a shell's `>` does.
// stat() comes first, so that the kernel decides whether the links may be followed.
std::string target_of(std::string path) {
  constexpr int kMostLinks = 40;  // the limit of the kernel
  struct stat info {};
  if (stat(path.c_str(), &info) != 0 && errno != ENOENT) store::Disk::fail("cannot write", path);
  for (int links = 0; links < kMostLinks; ++links) {
    std::error_code not_a_link;
    const std::filesystem::path next = std::filesystem::read_symlink(path, not_a_link);
    if (not_a_link) return path;
    path = std::filesystem::path(path).parent_path() / next;
  }
  errno = ELOOP;
  store::Disk::fail("cannot write", path);
}

// Returns the path of a temporary file beside `target`. Its name has at most NAME_MAX bytes.
std::string temporary(const std::string& target) {
  const std::string ending = fmt::format(".tmp-{:07}", getpid());
  const std::filesystem::path path(target);
  return path.parent_path() /
         (path.filename().string().substr(0, NAME_MAX - ending.size()) + ending);
}

// Throws if rename() could not replace `target`, such as another user's file in a sticky folder or
// an immutable file. Calls rmdir(), which makes the same checks but never removes a file.
void check_replaceable(const std::string& target) {
  struct statx info {};
  if (statx(AT_FDCWD, target.c_str(), AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &info) == 0 &&
      (info.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0) {
    errno = EBUSY;  // such as a file that is mounted into a container
    store::Disk::fail("cannot replace", target);
  }
  if (rmdir(target.c_str()) != 0 && errno != ENOTDIR) store::Disk::fail("cannot replace", target);
}

void check_target(const std::string& target) {
  struct stat info {};
  if (stat(target.c_str(), &info) == 0) {
    if (!S_ISREG(info.st_mode)) base::invalid(target + ": is not a plain file");
    check_replaceable(target);
  }
  const std::string unfinished = temporary(target);
  ::unlink(unfinished.c_str());
  const net::Fd fd(::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd.valid()) store::Disk::fail("cannot write", target);
  ::unlink(unfinished.c_str());
}

}  // namespace

void check_trace_path(const std::string& path) { check_target(target_of(path)); }

void write_trace(const std::string& path, const std::vector<RankTrace>& ranks,
                 const std::function<void(const char* name)>& before_system_call) {
  const std::string target = target_of(path);
  check_target(target);
  const store::Disk disk(before_system_call);
  base::TemporaryPath unfinished(temporary(target));
  store::OutputFile file(disk, AT_FDCWD, unfinished.path(), unfinished.path());
  Writer(file, ranks).write(ranks);
  file.finish();
  const std::string& from = unfinished.path();
  if (disk.call("rename", [&] { return ::rename(from.c_str(), target.c_str()); }) != 0) {
    store::Disk::fail("cannot rename to", target);
  }
  unfinished.keep();
}

void RunTrace::start(const OptionMap& options, int world_size) {
  const auto path = options.find("trace");
  if (path == options.end() || path->second.empty()) return;
  path_ = path->second;
  // Limits the file's size: a million events take about 150 MB, and viewers fail at 1 to 2 GB.
  constexpr size_t kEventsOfAFile = 4 * base::Tracer::kLimit;
  tracer_->start(std::min(base::Tracer::kLimit, kEventsOfAFile / static_cast<size_t>(world_size)));
}

void RunTrace::collect() {
  if (!collector_) return;
  try {
    ranks_ = collector_->collect();
  } catch (...) {
    error_ = rpc::error_in_flight(base::ErrorKind::kInternal);
    ranks_ = {rpc::own_trace(*agent_)};  // keeps at least this rank's trace
  }
}

std::optional<base::Error> RunTrace::write() {
  if (ranks_.empty()) return std::nullopt;
  const std::vector<base::RankTrace> ranks = std::exchange(ranks_, {});
  const std::string path = std::exchange(path_, {});  // write_own() must not overwrite the file
  try {
    write_trace(path, ranks);
  } catch (...) {
    return error_ ? error_ : base::current_error(base::ErrorKind::kInternal);
  }
  uint64_t dropped = 0;
  for (const base::RankTrace& rank : ranks) dropped += rank.dropped;
  if (dropped > 0) {
    sink_.warn(
        base::ErrorKind::kOverloaded,
        fmt::format("--trace {}: the last {} events were too many and are missing", path, dropped));
  }
  return error_;
}

}  // namespace distrain::job
