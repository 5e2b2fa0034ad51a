#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <uv.h>

#include "arena.h"
#include "distrain/net/socket.h"
#include "distrain/net/stream.h"

namespace distrain::net {

/// Returns an error for errno `code`: `resources` if descriptors or memory are exhausted, else
/// `rendezvous`. The message is "`what`: " and the reason.
base::Error socket_error(const std::string& what, int code);
/// Opens a non-blocking stream socket that is closed on exec.
Fd open_socket(int family);
/// Returns an option of the socket, or 0 if it has no such option.
int socket_option(int fd, int level, int name);
void set_socket_option(int fd, int level, int name, int value);
/// Replaces BBR, which paces what it sends: within one host large messages take twice as long for
/// no benefit.
void avoid_bbr(int fd);

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
/// Calls getaddrinfo(), which may block for long unless `flags` include AI_NUMERICHOST.
base::Result<AddressList> resolve(const std::string& host, uint16_t port, int flags);

struct UnixAddress {
  sockaddr_un address{};
  socklen_t size = 0;
};
base::Result<UnixAddress> unix_address(const std::string& path);
/// Returns true if a socket is connected to itself: if nobody listens on a port of the ephemeral
/// range, the kernel may choose that port for the connecting socket.
bool is_connected_to_itself(int fd);

/// An object with open libuv handles, which shut_down_on_loop() closes when the loop ends.
class LoopResource {
 public:
  virtual ~LoopResource() = default;
  virtual void shut_down_on_loop() = 0;
};

/// State shared with streams and listeners, which may outlive the Loop. After stop() no task runs.
///
/// Note [Who runs the loop]
///
/// A libuv loop may run on any thread, but on one thread at a time: the thread that holds `role`.
/// The loop's thread sleeps in epoll_wait() on `sleep_fd`, which contains the descriptor of libuv's
/// own epoll instance. When that is readable, the thread takes the role, runs the ready callbacks
/// and releases the role. A thread that polls for a reply or for its next task takes the role by
/// enter(), which also removes the events from `sleep_fd`, so that the loop's thread sleeps on, and
/// leave() restores them. So a message between two threads that poll wakes no third thread. Events
/// never get lost, because both epoll instances are level-triggered. Therefore everything that the
/// loop must do makes libuv's descriptor readable: posted tasks by an eventfd, timers by a timerfd.
struct Loop::Impl final : base::EventLoop {
  Impl();
  void stop();

  bool enter() override;
  bool run_ready() override;
  void leave() override;

  void post(base::Task task);
  uint64_t call_at(base::TimePoint when, base::Task task);
  void cancel(uint64_t id);
  void assert_in_loop() const;

  // Owns `resource` until the resource has closed its handles and calls release_on_loop().
  void hold_on_loop(std::shared_ptr<LoopResource> resource);
  void release_on_loop(LoopResource* resource);
  void note_activity_on_loop() { ++activity; }
  /// Returns the buffer into which streams read before they know a frame's size. All streams share
  /// it, because each stream consumes its bytes before another stream reads.
  std::span<uint8_t> scratch_on_loop() {
    constexpr size_t kBytes = 64 * 1024;
    if (!scratch) scratch = std::make_unique_for_overwrite<uint8_t[]>(kBytes);
    return {scratch.get(), kBytes};
  }

  bool in_loop() const {
    return thread_id.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

  uv_loop_t uv;
  base::BufferPool buffers;
  uint64_t activity = 0;  // counts messages, after which polling goes on; guarded by role

 private:
  using TimerKey = std::pair<base::TimePoint, uint64_t>;

  void run();
  void watch(uint32_t events);
  void run_posted_on_loop();
  void run_timers_on_loop();
  void arm_locked();

  std::mutex role;
  std::atomic<bool> is_wanted{false};      // a thread has found the role taken
  std::atomic<std::thread::id> thread_id;  // the thread that runs callbacks
  const pid_t process;                     // a forked child does not run its parent's loop
  Fd sleep_fd;
  uv_async_t wakeup;
  Fd timer_fd;
  uv_poll_t alarm;

  std::mutex mutex;
  std::vector<base::Task> posted;            // guarded by mutex
  bool stopping = false;                     // guarded by mutex; if true, tasks are dropped
  std::map<TimerKey, base::Task> timers;     // guarded by mutex
  std::map<uint64_t, base::TimePoint> due;   // guarded by mutex; times of `timers` by their ids
  uint64_t next_timer = 1;                   // guarded by mutex
  base::TimePoint armed_for = base::kNever;  // guarded by mutex; the time that timer_fd is set to
  std::atomic<int> wakers{0};                // threads inside uv_async_send

  // Guarded by `role`, except `thread`.
  bool stop_begun = false;
  std::unique_ptr<uint8_t[]> scratch;
  std::unordered_set<std::shared_ptr<LoopResource>> resources;
  std::thread thread;
};

/// An outgoing frame with its encoded header and the number of bytes written so far.
class PendingFrame {
 public:
  /// If `arena` has room for the payload, copies it there at once; else leaves a large payload for
  /// a bulk connection, if `has_bulk`.
  explicit PendingFrame(OutFrame frame, SendArena* arena = nullptr, bool has_bulk = false);
  /// Moves the payload out of this frame. Returns null if it does not travel in bulk.
  std::unique_ptr<PendingFrame> take_bulk();
  /// Writes until about `limit` bytes or the frame are written. Returns 0, EAGAIN if the socket
  /// accepts no more now, or another errno.
  int write_to(int fd, size_t limit);
  bool done() const { return written_ == total_; }
  size_t bytes_left() const { return total_ - written_; }

 private:
  PendingFrame() = default;
  template <class Add>
  void for_each_left(Add add) const;
  void copy_payload(uint8_t* to);

  OutFrame frame_;
  uint8_t head_[2 * wire::kHeaderBytes];  // kAttached, if needed, and the frame's header
  size_t head_bytes_ = 0;
  size_t total_ = 0;  // with the headers
  size_t written_ = 0;
};

}  // namespace distrain::net
