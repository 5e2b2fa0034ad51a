// Wraps all decoders of the wire layer as functions that return true for accepted bytes.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>

#include "distrain/wire/frame.h"
#include "distrain/wire/handshake.h"
#include "distrain/wire/tensor_desc.h"
#include "support/payload.h"

namespace distrain::wire {

inline bool is_plain(std::span<const uint8_t> in) {
  return in.size() >= sizeof kMagic && std::memcmp(in.data(), &kMagic, sizeof kMagic) == 0;
}

// Adds a header's hash to its magic if the magic is plain (has no hash). Otherwise does nothing.
inline void add_hash(std::span<uint8_t> bytes) {
  if (bytes.size() < kHeaderBytes || !is_plain(bytes)) return;
  const uint32_t magic = magic_of(bytes.first<kHeaderBytes>());
  std::memcpy(bytes.data(), &magic, sizeof magic);
}

// Each try_ function throws the decoder's exceptions. It traps if an accepted message is not
// encoded to the same bytes again, except for the order of options, which the sender chooses.
inline bool try_header(std::span<const uint8_t> in) {
  if (in.size() < kHeaderBytes) return false;
  const auto head = in.first<kHeaderBytes>();
  const Limits limits;
  const auto header = decode_header(head, limits);
  if (!header.ok()) {
    if (header.error().kind != base::ErrorKind::kProtocol) __builtin_trap();
    return false;
  }
  const FrameHeader& h = header.unchecked();
  if (h.meta_bytes > limits.max_meta_bytes || h.tensor_count > limits.max_tensors ||
      h.payload_bytes > limits.max_payload_bytes || h.body_bytes() < h.payload_bytes) {
    __builtin_trap();
  }
  std::array<uint8_t, kHeaderBytes> again;
  encode_header(h, again);
  // Earlier versions send a plain magic, which has no hash. Encoding adds the hash.
  if (!std::equal(again.begin() + sizeof kMagic, again.end(), in.begin() + sizeof kMagic) ||
      (!std::equal(again.begin(), again.end(), in.begin()) && !is_plain(in))) {
    __builtin_trap();
  }
  return true;
}

inline bool try_tensor_descs(std::span<const uint8_t> in) {
  Reader reader(in);
  std::vector<TensorDesc> tensors;
  while (reader.left() > 0) {
    tensors.push_back(decode_tensor_desc(reader));
    if (tensors.back().sizes.size() > kMaxDimensions) __builtin_trap();
  }
  const PayloadLayout layout = testing::layout_payload(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (layout.offsets[i] % kPayloadAlignment != 0 ||
        layout.offsets[i] + tensors[i].bytes() > layout.bytes) {
      __builtin_trap();
    }
  }
  Bytes again;
  Writer out(again);
  for (const TensorDesc& tensor : tensors) encode(tensor, out);
  if (!std::equal(again.begin(), again.end(), in.begin(), in.end())) __builtin_trap();
  return true;
}

inline bool try_hello(std::span<const uint8_t> in) {
  const Bytes again = encode(decode_hello(in));
  if (!std::equal(again.begin(), again.end(), in.begin(), in.end())) __builtin_trap();
  return true;
}

inline bool try_proof(std::span<const uint8_t> in) {
  const Proof proof = decode_proof(in);
  if (!std::equal(proof.begin(), proof.end(), in.begin(), in.end())) __builtin_trap();
  return true;
}

inline bool try_join(std::span<const uint8_t> in) {
  if (encode(decode_join(in)).size() != in.size()) __builtin_trap();
  return true;
}

inline bool try_directory(std::span<const uint8_t> in) {
  if (encode(decode_directory(in)).size() != in.size()) __builtin_trap();
  return true;
}

inline bool try_all_devices(std::span<const uint8_t> in) {
  const Bytes again = encode(decode_all_devices(in));
  if (!std::equal(again.begin(), again.end(), in.begin(), in.end())) __builtin_trap();
  return true;
}

inline bool try_error(std::span<const uint8_t> in) {
  const Bytes again = encode(decode_error(in));
  if (!std::equal(again.begin(), again.end(), in.begin(), in.end())) __builtin_trap();
  return true;
}

}  // namespace distrain::wire
