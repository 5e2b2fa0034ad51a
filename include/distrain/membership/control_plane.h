#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/membership/loss.h"
#include "distrain/membership/options.h"
#include "distrain/net/stream.h"

namespace distrain::membership {

/// A rank's membership in its job. Lets the rank join, monitors the other ranks, reports losses and
/// ends the job: see Note [Control plane] in src/membership/control_protocol.h.
///
/// Threads: run() blocks the joining thread. Functions without `_on_loop` are thread-safe. The loop
/// must be destroyed before the objects that the callbacks use.
class ControlPlane {
 public:
  /// The functions that the control plane calls on the loop thread.
  struct Callbacks {
    /// Called with the endpoint of each rank. This rank connects to the unix socket `unix_name` of
    /// an endpoint if that is set, otherwise by TCP. An endpoint without `host` has no TCP address.
    std::function<void(const wire::Directory& directory)> on_directory;
    /// Called once, when every rank accepts calls. An exception ends the job for all ranks.
    std::function<void(std::vector<std::string> names, std::vector<wire::RankDevices> devices)>
        on_go;
    /// Called if this rank fails to join: instead of on_go(), or after on_go() has thrown.
    std::function<void(const base::Error& error)> on_failed;
    std::function<void(const Loss& loss)> on_lost;
    /// Called before on_returned(), with the devices of the new process of `rank`. Throws if these
    /// devices do not fit those of the other ranks.
    std::function<void(int rank, const wire::RankDevices& devices)> on_new_devices;
    /// Called when a new process has replaced a lost rank. `entry` is its new directory entry.
    std::function<void(int rank, const wire::Directory::Entry& entry)> on_returned;
    /// Called when another rank has connected for calls. Returns an error to refuse the connection.
    std::function<std::optional<base::Error>(int rank, const net::StreamPtr& stream)> on_peer;
  };
  /// Creates the control plane. On rank 0, also binds the listening socket.
  static std::shared_ptr<ControlPlane> make(net::Loop& loop, const Options& options,
                                            Callbacks callbacks);
  virtual ~ControlPlane() = default;
  /// Joins the job; returns when every rank accepts calls, or throws. When rank 0's options are
  /// known and before other ranks can call this rank, gets this rank's devices from `prepare`.
  virtual void run(const std::function<wire::RankDevices()>& prepare) = 0;
  /// Called instead of run() by a process without a rank. Returns a free rank, which rank 0
  /// reserves until this process has joined or calls close(). Retries until the join timeout.
  virtual int reserve_rank() = 0;
  /// Returns true if rank 0 has admitted this rank. run() may still wait for other ranks.
  virtual bool is_admitted() const = 0;
  virtual uint16_t port() const = 0;
  /// Enters the shutdown round `round`, a barrier of all ranks. The result is the sum of all ranks'
  /// `number`. Fails if a rank is lost, or if this rank has not joined or has left.
  virtual base::Future<uint64_t> enter_round(uint64_t round, uint64_t number) = 0;
  /// Returns the ranks that this rank waits for, as far as it knows. Blocks until the loop answers.
  virtual std::vector<int> missing() = 0;
  /// Returns the join or shutdown that is waiting for other ranks, if any.
  virtual std::optional<Wait> wait() = 0;
  /// Sends `error` to all connected ranks as the reason that this rank exits, then disconnects.
  virtual void abort(const base::Error& error) = 0;
  /// Notifies all connected ranks that this rank exits because its work is done, then disconnects.
  virtual void leave() = 0;
  /// Closes all connections and refuses new ones.
  virtual void close() = 0;
  /// Called on rank 0. Sets the tolerated losses; the future completes when they are in effect.
  virtual base::Future<void> tolerate(Tolerance tolerance) = 0;
  /// Called on rank 0 when the new process of `rank` has done useful work. Until this call, the job
  /// continues after any failure of that process.
  virtual void note_of_use(int rank) = 0;
  /// Waits until the last messages are sent, for one second at most.
  virtual void wait_until_flushed() = 0;

  // The following functions handle connections for calls. They must run on the loop thread.

  /// Monitors the connection to `rank`. Returns the handler to set on `stream`, which passes calls
  /// to `handler`.
  virtual net::Stream::Handler watch_peer_on_loop(int rank, const net::StreamPtr& stream,
                                                  net::Stream::Handler handler) = 0;
  /// Returns true while this rank suspects that `rank` is lost, until rank 0 has decided.
  virtual bool is_suspected_on_loop(int rank) const = 0;
  /// Reports to rank 0 that `rank` is unreachable or has sent malformed data.
  virtual void report_on_loop(int rank, base::Error error) = 0;
  /// Runs the handshake with `rank` on a connection that this rank has opened for calls. Calls
  /// `done` once. On success, `done` sets the stream's handler. On failure, the stream is already
  /// closed. The caller may retry after `peer_lost`: the other side closed the stream without a
  /// message or did not answer in time.
  virtual void authenticate_on_loop(int rank, const net::StreamPtr& stream,
                                    std::function<void(base::Status believed)> done) = 0;
};

}  // namespace distrain::membership
