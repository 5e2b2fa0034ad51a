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

/// A rank's membership in its job: it joins, monitors the other ranks, learns of losses and ends
/// together with the others, by Note [Control plane] in src/membership/control_protocol.h.
///
/// Threads: run() blocks the joining thread. Functions without `_on_loop` are for any thread. The
/// loop must be destroyed before the objects that the callbacks use.
class ControlPlane {
 public:
  /// Called on the loop.
  struct Callbacks {
    /// `directory` has the endpoints as this rank reaches them: by `unix_name` if that is not
    /// empty, otherwise by TCP. If `host` is empty, TCP is not used.
    std::function<void(const wire::Directory& directory)> on_directory;
    /// Called once, when every rank can be called. An exception ends the job for all ranks.
    std::function<void(std::vector<std::string> names, std::vector<wire::RankDevices> devices)>
        on_go;
    /// Called instead of on_go() if this rank does not join, or after it if this rank ends.
    std::function<void(const base::Error& error)> on_failed;
    std::function<void(const Loss& loss)> on_lost;
    /// Called before on_returned(), with the devices of the new process. Throws if they do not fit
    /// the other ranks'.
    std::function<void(int rank, const wire::RankDevices& devices)> on_new_devices;
    /// Called when a new process has replaced a lost rank: its entry, as in on_directory().
    std::function<void(int rank, const wire::Directory::Entry& entry)> on_returned;
    /// Called when another rank has connected for calls. Returns an error to refuse it.
    std::function<std::optional<base::Error>(int rank, const net::StreamPtr& stream)> on_peer;
  };
  /// Rank 0 binds its socket here.
  static std::shared_ptr<ControlPlane> make(net::Loop& loop, const Options& options,
                                            Callbacks callbacks);
  virtual ~ControlPlane() = default;
  /// Returns when every rank can be called, otherwise throws. `prepare` returns this rank's
  /// devices. It is called when rank 0's options are known, before another rank can call this one.
  virtual void run(const std::function<wire::RankDevices()>& prepare) = 0;
  /// For wire::kUnassignedRank, instead of run(): returns a free rank, which rank 0 reserves until
  /// this process has joined or close() is called. Retries until the join timeout.
  virtual int reserve_rank() = 0;
  /// Returns true when rank 0 has admitted this rank, which then waits for the others.
  virtual bool is_admitted() const = 0;
  virtual uint16_t port() const = 0;
  /// Enters `round` of the end. The result is the sum of all ranks' `number`, once all have
  /// entered. Fails if a rank is lost, or if this rank has not joined or has ended.
  virtual base::Future<uint64_t> enter_round(uint64_t round, uint64_t number) = 0;
  /// Returns the ranks that this one waits for, as far as it knows. Not on the loop.
  virtual std::vector<int> missing() = 0;
  /// Returns the wait for ranks to join or to end, if there is one.
  virtual std::optional<Wait> wait() = 0;
  /// Tells all ranks that this one leaves, with or without an error, then closes the connections.
  virtual void abort(const base::Error& error) = 0;
  virtual void leave() = 0;
  /// Closes all connections and refuses new ones.
  virtual void close() = 0;
  /// Rank 0: sets the tolerated losses. The result is complete when they are in effect.
  virtual base::Future<void> tolerate(Tolerance tolerance) = 0;
  /// Rank 0: no longer tolerates all failures of the new process of `rank`.
  virtual void note_of_use(int rank) = 0;
  /// Waits until the last messages are sent, for a second at most.
  virtual void wait_until_flushed() = 0;

  // Connections for calls, on the loop:

  /// Monitors the other end. Returns the stream's new handler, which passes calls to `handler`.
  virtual net::Stream::Handler watch_peer_on_loop(int rank, const net::StreamPtr& stream,
                                                  net::Stream::Handler handler) = 0;
  /// Returns true if `rank` seems lost and rank 0 has not decided yet.
  virtual bool is_suspected_on_loop(int rank) const = 0;
  /// Reports that `rank` cannot be reached, or that it has sent malformed data.
  virtual void report_on_loop(int rank, base::Error error) = 0;
  /// Runs the handshake with `rank` on a connection that this rank has made for calls. Calls `done`
  /// once: with success, when the stream needs a new handler; or with an error, when the stream is
  /// closed. After `peer_lost` (the other side closed without a message, or did not answer in time)
  /// the caller may retry.
  virtual void authenticate_on_loop(int rank, const net::StreamPtr& stream,
                                    std::function<void(base::Status believed)> done) = 0;
};

}  // namespace distrain::membership
