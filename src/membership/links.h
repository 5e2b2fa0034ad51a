#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "control_protocol.h"
#include "distrain/net/stream.h"

namespace distrain::membership {

/// The streams of this rank's connections. On the loop, except wait_until_closed().
class Links {
 public:
  Link add(const net::StreamPtr& stream) {
    std::lock_guard lock(mutex_);
    ++open_;
    streams_[++last_] = stream;
    return last_;
  }
  /// Called first and last when a stream that was added is closed; remove() does both.
  void begin_close(Link link) { streams_.erase(link); }
  void end_close() {
    std::lock_guard lock(mutex_);
    --open_;
    closed_.notify_all();
  }
  void remove(Link link) {
    begin_close(link);
    end_close();
  }

  void send(Link link, Message message) const {
    const auto stream = streams_.find(link);
    if (stream == streams_.end()) return;
    net::OutFrame frame;
    frame.header.kind = message.kind;
    frame.header.call_id = message.a;
    frame.header.context_id = message.b;
    frame.shared_meta = message.body.shared();
    static_cast<void>(stream->second->send(std::move(frame)));  // on_close reports errors
  }
  void close(Link link, bool flush) {
    if (const auto taken = streams_.extract(link)) taken.mapped()->close(flush);
  }
  void close_all() {
    for (const auto& [link, stream] : std::exchange(streams_, {})) stream->close();
  }
  const std::map<Link, net::StreamPtr>& streams() const { return streams_; }

  /// Waits until all streams that were added are closed, for `limit` at most.
  void wait_until_closed(base::Duration limit) {
    std::unique_lock lock(mutex_);
    closed_.wait_for(lock, limit, [this] { return open_ == 0; });
  }

 private:
  std::map<Link, net::StreamPtr> streams_;
  Link last_ = 0;
  std::mutex mutex_;
  std::condition_variable closed_;
  int open_ = 0;  // guarded by mutex_
};

}  // namespace distrain::membership
