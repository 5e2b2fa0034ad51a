#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "distrain/wire/handshake.h"

namespace distrain::membership {

/// A key for HMAC-SHA256.
using Key = std::array<uint8_t, 32>;

/// Initializes OpenSSL. Static objects constructed after this call are destroyed at exit while
/// OpenSSL still works: Note [OpenSSL at exit] in keys.cpp.
void set_up_openssl();

/// Fills `out`, of 256 bytes at most, from the system's random source. Throws `resources` if it
/// fails.
void fill_random(std::span<uint8_t> out);
/// Returns `count` random bytes, 256 at most.
std::string random_bytes(size_t count);
/// Returns `bytes` in hexadecimal digits.
std::string hex(std::string_view bytes);

/// Returns the HKDF-SHA256 (RFC 5869) of `secret`, which may be empty, with `use` as info.
Key derive_key(std::string_view secret, std::string_view use);
/// Returns the HMAC-SHA256 of the concatenated `parts`.
wire::Proof authenticate(const Key& key, std::initializer_list<std::span<const uint8_t>> parts);
/// Compares in constant time.
bool is_equal(const wire::Proof& a, const wire::Proof& b);

/// Returns the number of a job out of its name: the first bytes of the name's SHA-256.
wire::JobId job_id_of(std::string_view name);

}  // namespace distrain::membership
