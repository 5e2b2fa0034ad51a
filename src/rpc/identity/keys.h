#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "distrain/wire/handshake.h"

namespace distrain::rpc::identity {

/// A key of HMAC-SHA256.
using Key = std::array<uint8_t, 32>;

/// Makes OpenSSL ready. What is destroyed at the process's exit and was made after this is
/// destroyed while OpenSSL still works: Note [OpenSSL at exit] in keys.cpp.
void set_up();

/// From the system's source: bytes that nobody can guess. `resources` if it has none.
void fill_random(std::span<uint8_t> out);
std::string random_bytes(size_t count);
/// Two digits each.
std::string hex(std::string_view bytes);

/// HKDF-SHA256 (RFC 5869) of `secret`, which may be empty, for what `use` says.
Key derive(std::string_view secret, std::string_view use);
/// HMAC-SHA256 over the parts, one after the other.
wire::Proof authenticate(const Key& key, std::initializer_list<std::span<const uint8_t>> parts);
/// Takes as long for different ones as for equal ones.
bool is_equal(const wire::Proof& a, const wire::Proof& b);

/// The number of the job that is called so by whoever runs it: a part of its SHA-256.
wire::JobId job_id_of(std::string_view name);

}  // namespace distrain::rpc::identity
