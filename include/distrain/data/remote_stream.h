#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/data/stream.h"

namespace distrain::data {

/// Consecutive batches of one trainer.
struct HandedOut {
  /// The batches, each with the position in the stream after the round in which all trainers got a
  /// batch.
  std::vector<std::pair<Batch, StreamPosition>> batches;
  bool ended = false;  ///< no batch of this trainer follows
  bool has_one_pass = false;
  int64_t bad_rows = 0;
  std::string first_bad_row;
  static constexpr auto kFields =
      std::tuple(&HandedOut::batches, &HandedOut::ended, &HandedOut::has_one_pass,
                 &HandedOut::bad_rows, &HandedOut::first_bad_row);
};

/// Hands out the batches of one stream to several trainers in rounds, for data that one process
/// must read, such as a pipe: batch k of trainer t of T is batch k · T + t of the stream.
///
/// Thread-safe. Holds the batches that some trainers have taken and others have not, which are few
/// because trainers on streams make equal numbers of steps.
class StreamServer {
 public:
  /// `options` must have one shard.
  StreamServer(const StreamOptions& options, int trainers)
      : trainers_(static_cast<size_t>(trainers)), stream_(options) {}

  /// Returns at most `count` batches of `trainer`, from its batch number `first` after `from` on.
  /// Waits until they are read. A call with a new `from` and a `first` of 0 moves the stream there;
  /// all trainers must then go on from there. Throws as Stream::ready().
  HandedOut take(int trainer, const StreamPosition& from, int64_t first, int64_t count);
  /// Ends the calls of take() that wait for data: they, and all later calls, throw `cancelled`.
  void stop() { stopped_ = true; }
  uint64_t content_key() const { return stream_.content_key(); }

 private:
  struct Round {
    std::vector<std::optional<Batch>> batches;  // by trainer; empty if taken, or if there is none
    bool is_full = true;                        // each trainer has or had a batch
    StreamPosition after;
  };
  void read_round();

  const size_t trainers_;
  std::atomic<bool> stopped_ = false;
  std::mutex mutex_;  // guards what follows
  Stream stream_;
  std::optional<StreamPosition> from_;
  std::deque<Round> rounds_;
  int64_t first_round_ = 0;  // number of rounds_.front() after `from_`
  bool ended_ = false;
};

/// A trainer's batches of a StreamServer, which it takes some batches ahead.
class RemoteStream final : public Source {
 public:
  /// Calls StreamServer::take() for this trainer.
  using Take = std::function<base::Future<HandedOut>(const StreamPosition& from, int64_t first,
                                                     int64_t count)>;
  explicit RemoteStream(Take take) : take_(std::move(take)) {}

  void begin(const StreamPosition& position) override;
  bool await(std::chrono::milliseconds limit) override;
  int64_t ready() override;
  Batch next() override;
  StreamPosition position() const override { return position_; }
  bool has_one_pass() const override { return has_one_pass_; }
  Counts counts() const override { return counts_; }

 private:
  void ask();
  void receive();

  const Take take_;
  StreamPosition from_, position_;
  int64_t asked_ = 0;                               // batches requested since begin()
  std::optional<base::Future<HandedOut>> pending_;  // the request under way
  std::deque<std::pair<Batch, StreamPosition>> ahead_;
  bool ended_ = false, has_one_pass_ = false;
  Counts counts_;
};

}  // namespace distrain::data
