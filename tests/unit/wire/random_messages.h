// Generates random messages, and damages messages at random, from a seed.
#pragma once

#include <cstdlib>
#include <random>
#include <span>
#include <string>

#include "distrain/wire/frame.h"
#include "distrain/wire/handshake.h"
#include "distrain/wire/tensor_desc.h"

namespace distrain::wire {

class RandomMessages {
 public:
  explicit RandomMessages(uint64_t seed) : random_(seed) {}

  uint64_t bits() { return random_(); }
  size_t below(size_t n) { return random_() % n; }
  bool one_in(size_t n) { return below(n) == 0; }

  void fill(std::span<uint8_t> bytes) {
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(bits());
  }

  std::string text(size_t longest = 20) {
    std::string text(one_in(200) ? 3000 : below(longest + 1), '\0');
    for (char& c : text) c = static_cast<char>(bits());
    return text;
  }

  std::map<std::string, std::string> options() {
    std::map<std::string, std::string> options;
    for (size_t i = below(5); i > 0; --i) options[text()] = text();
    return options;
  }

  Endpoint endpoint() { return {text(), static_cast<uint16_t>(bits()), text(), text(), bits()}; }

  Hello hello() {
    Hello hello;
    hello.purpose = static_cast<HelloPurpose>(1 + below(3));
    hello.trust = static_cast<Trust>(1 + below(3));
    hello.rank = static_cast<int32_t>(bits());
    hello.generation = static_cast<uint32_t>(bits());
    hello.incarnation = static_cast<uint32_t>(bits());
    fill(hello.job_id);
    fill(hello.nonce);
    return hello;
  }

  Proof proof() {
    Proof proof;
    fill(proof);
    return proof;
  }

  Join join() {
    Join join;
    join.job = text();
    join.world_size = static_cast<int32_t>(bits());
    join.endpoint = endpoint();
    join.options = options();
    return join;
  }

  Directory directory() {
    Directory directory;
    for (size_t i = below(6); i > 0; --i) {
      directory.ranks.push_back({text(), endpoint(), static_cast<uint32_t>(bits()), one_in(2)});
    }
    directory.options = options();
    directory.secret = text();
    return directory;
  }

  base::Error error() {
    return {static_cast<base::ErrorKind>(1 + below(14)), text(), static_cast<int32_t>(bits()),
            text()};
  }

  DeviceRef device() {
    const auto type = static_cast<DeviceType>(below(3));
    return {type, static_cast<uint8_t>(type == DeviceType::kCpu ? 0 : bits())};
  }

  RankDevices rank_devices() {
    RankDevices devices{
        device(), static_cast<DeviceType>(below(3)), static_cast<uint8_t>(bits()), {}};
    for (size_t i = below(4); i > 0; --i) devices.maps.push_back({text(), device(), device()});
    return devices;
  }

  TensorDesc tensor_desc() {
    TensorDesc desc;
    desc.dtype = static_cast<DType>(1 + below(15));
    uint64_t bytes = element_bytes(desc.dtype);
    for (size_t i = one_in(20) ? below(kMaxDimensions + 1) : below(5); i > 0; --i) {
      const uint64_t room = (uint64_t{1} << 62) / bytes;
      uint64_t size = bits() >> (1 + below(63));
      if (size > room) size = room > 0 ? size % (room + 1) : 0;
      if (size != 0) bytes *= size;
      desc.sizes.push_back(static_cast<int64_t>(size));
    }
    if (desc.sizes.size() == 4 && one_in(2)) desc.layout = Layout::kChannelsLast;
    if (desc.sizes.size() == 5 && one_in(2)) desc.layout = Layout::kChannelsLast3d;
    if (one_in(2)) desc.device = device();
    return desc;
  }

  FrameHeader header(const Limits& limits = {}) {
    constexpr FrameKind kKinds[] = {FrameKind::kHello,       FrameKind::kReject,
                                    FrameKind::kDirectory,   FrameKind::kPrepared,
                                    FrameKind::kGo,          FrameKind::kProof,
                                    FrameKind::kJoin,        FrameKind::kJoined,
                                    FrameKind::kCall,        FrameKind::kReply,
                                    FrameKind::kError,       FrameKind::kOneway,
                                    FrameKind::kChunk,       FrameKind::kCancel,
                                    FrameKind::kCredit,      FrameKind::kCreditRequest,
                                    FrameKind::kHeartbeat,   FrameKind::kFlush,
                                    FrameKind::kAbort,       FrameKind::kLost,
                                    FrameKind::kLeave,       FrameKind::kReturned,
                                    FrameKind::kKnown,       FrameKind::kRRefFork,
                                    FrameKind::kRRefAccept,  FrameKind::kRRefDelete,
                                    FrameKind::kSmallCredit, FrameKind::kSmallCreditRequest};
    FrameHeader header;
    header.kind = kKinds[below(std::size(kKinds))];
    header.channel = static_cast<uint16_t>(bits());
    header.meta_bytes = static_cast<uint32_t>(bits() % (uint64_t{limits.max_meta_bytes} + 1));
    header.tensor_count = static_cast<uint32_t>(bits() % (uint64_t{limits.max_tensors} + 1));
    header.payload_bytes = bits() % (limits.max_payload_bytes + 1);
    header.call_id = bits();
    header.context_id = bits();
    header.autograd_id = bits();
    header.in_bulk = header.payload_bytes >= kLeastInBulk && one_in(2);
    return header;
  }

  // Applies random damage: flips bits, sets, inserts, removes or repeats bytes, or truncates.
  void mutate(Bytes& bytes) {
    for (size_t n = 1 + below(4); n > 0; --n) {
      const size_t at = bytes.empty() ? 0 : below(bytes.size());
      switch (below(7)) {
        case 0:
          if (!bytes.empty()) bytes[at] ^= static_cast<uint8_t>(1u << below(8));
          break;
        case 1:
          if (!bytes.empty()) bytes[at] = static_cast<uint8_t>(bits());
          break;
        case 2:
          bytes.resize(at);
          break;
        case 3:
          bytes.insert(bytes.begin() + static_cast<long>(at), static_cast<uint8_t>(bits()));
          break;
        case 4:
          if (!bytes.empty()) bytes.erase(bytes.begin() + static_cast<long>(at));
          break;
        case 5:
          for (size_t i = at; i < bytes.size() && i < at + 4; ++i) bytes[i] = 0xFF;
          break;
        case 6: {
          const size_t end = at + below(bytes.size() - at + 1);
          const Bytes piece(bytes.begin() + static_cast<long>(at),
                            bytes.begin() + static_cast<long>(end));
          bytes.insert(bytes.end(), piece.begin(), piece.end());
          break;
        }
      }
    }
  }

  Bytes noise(size_t longest) {
    Bytes bytes(below(longest + 1));
    const bool small = one_in(2);  // small values get further into a decoder
    uint64_t word = 0;
    for (size_t i = 0; i < bytes.size(); ++i, word >>= 16) {
      if (i % 4 == 0) word = bits();
      const bool cut = small && (word >> 8) % 8 != 0;
      bytes[i] = static_cast<uint8_t>(cut ? word % 4 : word);
    }
    return bytes;
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace distrain::wire
