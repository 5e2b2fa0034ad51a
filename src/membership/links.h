#pragma once

#include <condition_variable>
#include <map>
#include <mutex>

#include "control_protocol.h"
#include "distrain/net/stream.h"

namespace distrain::membership {

/// The streams of this rank's connections. On the loop, except wait_until_closed().
class Links {
 public:
  Link add(const net::StreamPtr& stream);
  /// Removes a link whose stream somebody else closes.
  void remove(Link link);
  void send(Link link, Message message) const;
  void close(Link link, bool flush);
  void close_all();
  const std::map<Link, net::StreamPtr>& streams() const { return streams_; }

  /// Called first and last when a stream that was added is closed: see wait_until_closed().
  void begin_close(Link link) { streams_.erase(link); }
  void end_close();
  /// Waits until all streams that were added are closed, for `limit` at most.
  void wait_until_closed(base::Duration limit);

 private:
  std::map<Link, net::StreamPtr> streams_;
  Link next_ = 1;
  std::mutex mutex_;
  std::condition_variable closed_;
  int open_ = 0;  // guarded by mutex_
};

}  // namespace distrain::membership
