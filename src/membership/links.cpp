#include "links.h"

#include <utility>

namespace distrain::membership {

Link Links::add(const net::StreamPtr& stream) {
  const Link link = next_++;
  streams_[link] = stream;
  std::lock_guard lock(mutex_);
  ++open_;
  return link;
}

void Links::remove(Link link) {
  streams_.erase(link);
  std::lock_guard lock(mutex_);
  --open_;
}

void Links::send(Link link, Message message) const {
  const auto stream = streams_.find(link);
  if (stream == streams_.end()) return;
  net::OutFrame frame;
  frame.header.kind = message.kind;
  frame.header.call_id = message.a;
  frame.header.context_id = message.b;
  frame.shared_meta = message.body.shared();
  static_cast<void>(stream->second->send(std::move(frame)));  // on_close reports errors
}

void Links::close(Link link, bool flush) {
  const auto found = streams_.find(link);
  if (found == streams_.end()) return;
  const net::StreamPtr stream = std::move(found->second);
  streams_.erase(found);
  stream->close(flush);
}

void Links::close_all() {
  const auto streams = std::exchange(streams_, {});
  for (const auto& [link, stream] : streams) stream->close();
}

void Links::end_close() {
  std::lock_guard lock(mutex_);
  --open_;
  closed_.notify_all();
}

void Links::wait_until_closed(base::Duration limit) {
  std::unique_lock lock(mutex_);
  closed_.wait_for(lock, limit, [this] { return open_ == 0; });
}

}  // namespace distrain::membership
