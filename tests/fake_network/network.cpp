#include "network.h"

#include <algorithm>

namespace distrain::fake_network {

namespace {

base::Error broken(const char* how) {
  return {base::ErrorKind::kPeerLost, std::string("the peer: ") + how, -1, {}};
}

}  // namespace

// Returns a random delay: usually short, sometimes long.
Duration Network::delay() {
  const double part = random_.unit();
  const double share = random_.below(8) == 0 ? part : part * 0.1;
  return std::chrono::microseconds(20) +
         std::chrono::duration_cast<Duration>(longest_delay_ * share);
}

bool Network::gets_through(End from) {
  const auto cut = cuts_.find({host_of(from).place(), host_of(from.other()).place()});
  return cut == cuts_.end() || cut->second == 0;
}

// ---- connections ----

void Network::connect(Host& from, Host& to, TimePoint deadline, OnConnected on_connected) {
  try_to_connect(from, to, deadline, std::chrono::seconds(1), std::move(on_connected));
}

// Connects. While a cut blocks the way, retries like a kernel, with delays that double.
void Network::try_to_connect(Host& from, Host& to, TimePoint deadline, Duration retry,
                             OnConnected on_connected) {
  if (time_.now() >= deadline) return on_connected(std::nullopt);
  const auto is_cut = [&](const Host& a, const Host& b) {
    const auto cut = cuts_.find({a.place(), b.place()});
    return cut != cuts_.end() && cut->second > 0;
  };
  if (is_cut(from, to) || is_cut(to, from)) {
    time_.at(std::min(deadline, time_.now() + retry),
             [this, &from, &to, deadline, retry, on_connected = std::move(on_connected)]() mutable {
               try_to_connect(from, to, deadline, retry * 2, std::move(on_connected));
             });
    return;
  }
  time_.after(delay(), [this, &from, &to, on_connected = std::move(on_connected)]() mutable {
    if (!to.is_listening()) {
      time_.after(delay(),
                  [on_connected = std::move(on_connected)] { on_connected(std::nullopt); });
      return;
    }
    const size_t number = connections_.size();
    connections_.emplace_back();
    Connection& made = connections_.back();
    made.sides[0].host = &from;
    made.sides[1].host = &to;
    made.sides[0].heard = made.sides[1].heard = time_.now();
    const End here{number, 0};
    ends_[&from].push_back(here);
    ends_[&to].push_back(here.other());
    to.on_connection(here.other());
    time_.after(delay(), [here, on_connected = std::move(on_connected)] { on_connected(here); });
  });
}

void Network::close(End end, bool flush) {
  Side& here = side(end);
  if (!here.is_open) return;
  here.is_open = false;
  here.coming.clear();
  if (!flush && !gets_through(end) && random_.below(2) == 0) side(end.other()).coming.clear();
  push(end, std::nullopt);
}

void Network::reset(size_t connection) {
  for (int at = 0; at < 2; ++at) {
    const End to{connection, at};
    Side& there = side(to);
    there.coming.clear();
    there.last_due = time_.now();
    push(to.other(), std::nullopt);
  }
}

// Closes all connections of `host`. May discard sent data, like a kernel that sends a reset.
void Network::close_all_of(Host& host) {
  for (const End end : ends_[&host]) {
    Side& here = side(end);
    if (!here.is_open) continue;
    here.is_open = false;
    here.coming.clear();
    auto& under_way = side(end.other()).coming;
    if (random_.below(2) == 0 && !under_way.empty()) {
      under_way.resize(random_.below(under_way.size() + 1));
    }
    push(end, std::nullopt);
  }
}

std::vector<End> Network::open_ends() const {
  std::vector<End> open;
  for (size_t i = 0; i < connections_.size(); ++i) {
    for (int at = 0; at < 2; ++at) {
      if (connections_[i].sides[at].is_open) open.push_back({i, at});
    }
  }
  return open;
}

// ---- messages ----

void Network::send(End from, Message message) { push(from, std::move(message)); }

void Network::push(End from, std::optional<Message> message) {
  Side& to = side(from.other());
  if (!to.is_open) return;
  to.last_due = std::max(to.last_due, time_.now() + delay());
  to.coming.push_back({to.last_due, std::move(message)});
  schedule(from.other());
}

void Network::schedule(End to) {
  Side& there = side(to);
  if (there.is_scheduled || there.coming.empty()) return;
  there.is_scheduled = true;
  time_.at(there.coming.front().due, [this, to] {
    side(to).is_scheduled = false;
    deliver(to);
  });
}

// Delivers the next message, unless a cut or a stop blocks it until heal() or resume().
void Network::deliver(End to) {
  Side& there = side(to);
  if (!there.is_open || there.coming.empty()) return;
  if (!gets_through(to.other()) || !there.host->is_reading()) return;
  if (there.coming.front().due > time_.now()) return schedule(to);
  const Item item = std::move(there.coming.front());
  there.coming.pop_front();
  if (item.message) {
    there.heard = time_.now();
    there.host->on_message(to, *item.message);
  } else {
    there.is_open = false;
    there.coming.clear();
    there.host->on_end(to, broken("closed the connection"));
  }
  schedule(to);
}

void Network::heal(int from, int to) {
  if (--cuts_[{from, to}] > 0) return;
  for (size_t i = 0; i < connections_.size(); ++i) {
    for (int at = 0; at < 2; ++at) {
      const End end{i, at};
      Side& there = side(end);
      if (!there.is_open || there.coming.empty() || there.host->place() != to ||
          host_of(end.other()).place() != from) {
        continue;
      }
      there.coming.front().due = std::max(there.coming.front().due, time_.now() + delay());
      there.last_due = std::max(there.last_due, there.coming.front().due);
      schedule(end);
    }
  }
}

void Network::resume(Host& host) {
  for (const End end : ends_[&host]) {
    Side& here = side(end);
    if (!here.is_open || here.coming.empty()) continue;
    const Duration look = std::chrono::nanoseconds(random_.below(200'000));  // delay until read
    here.coming.front().due = std::max(here.coming.front().due, time_.now() + look);
    schedule(end);
  }
}

}  // namespace distrain::fake_network
