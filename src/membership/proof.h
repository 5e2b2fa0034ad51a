#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "distrain/wire/handshake.h"

namespace distrain::membership {

/// A key for HMAC-SHA256.
using Key = std::array<uint8_t, 32>;

/// Initializes OpenSSL so that static objects that are constructed after this call can still use
/// OpenSSL when they are destroyed: see Note [OpenSSL at exit].
void set_up_openssl();
/// Fills `out`, at most 256 bytes, with random bytes. Throws `resources` if the system has none.
void fill_random(std::span<uint8_t> out);
/// Returns `count` random bytes; `count` is at most 256.
std::string random_bytes(size_t count);
std::string hex(std::string_view bytes);
/// Returns the HKDF-SHA256 (RFC 5869) of `secret`, with `use` as info. `secret` may be empty.
Key derive_key(std::string_view secret, std::string_view use);
/// Returns the HMAC-SHA256 of the concatenated `parts`.
wire::Proof authenticate(const Key& key, std::initializer_list<std::span<const uint8_t>> parts);
/// Returns the job id for a job's name: the first bytes of the name's SHA-256 hash.
wire::JobId job_id_of(std::string_view name);

using base::Error;
using base::ErrorKind;
using base::Exception;

// Note [Identity]
//
// Each side of a new connection sends a hello with its identity and a fresh nonce, then proves that
// it knows its key, the initiator first.
//
//   proof of a side = HMAC-SHA256(key of that side, the initiator's hello · the responder's hello)
//   key of a side   = HKDF-SHA256(secret, "join initiator", "peer responder", …)
//
// A proof covers all bytes of both hellos, so no field can be changed in transit. The nonces
// prevent the replay of another connection's proof. The sides have different keys, so a proof sent
// back to its maker is invalid.
//
// The secret of a connection to rank 0 (join) depends on what the ranks trust:
//
//   token      the job's token, which only its ranks know
//   same user  none. Each side asks the kernel for the owner of the peer process, which must be on
//              this host and in this network namespace: net::peer_user()
//   anybody    none (--insecure)
//
// The secret of a connection for calls (peer) is the directory's secret and the token. Rank 0 makes
// the directory's secret, and sends it to ranks that have proved themselves.
//
// A responder tells an unproved peer only its hello, which is not secret, and the protocol version:
// refusal_without_reason(). A proved rank of another job or generation is told why: mismatch().

/// The identity that a rank states in its hello.
struct Identity {
  int rank = 0;
  wire::Trust trust = wire::Trust::kSameUser;
  uint32_t generation = 0;   ///< wire::kAnyGeneration: not known yet
  wire::JobId job_id{};      ///< zero: not known yet
  uint32_t incarnation = 0;  ///< 0 when joining, because rank 0 assigns it
};

/// The identity of one side of a connection, and the secret that this side proves to know.
struct Credentials {
  Identity self;
  std::string secret;  ///< may be empty
};

/// One side of a handshake. Not thread-safe.
class Side {
 public:
  /// Returns the hello to send.
  const wire::Bytes& hello() const { return own_; }
  /// Returns the other side's hello, which is not trustworthy before check() has returned.
  const wire::Hello& other() const { return other_; }

 protected:
  Side(const Credentials& credentials, wire::HelloPurpose purpose, const char* own,
       const char* other);

  Key own_key_;
  Key other_key_;
  wire::Bytes own_;
  wire::Bytes theirs_;
  wire::Hello other_;
};

/// The side that opened the connection.
class Initiator : public Side {
 public:
  Initiator(const Credentials& credentials, wire::HelloPurpose purpose)
      : Side(credentials, purpose, "initiator", "responder"), purpose_(purpose) {}
  /// Takes the responder's hello and returns the proof to send. Throws `protocol` if the bytes are
  /// no valid hello, `auth` if the hello is for another purpose.
  wire::Proof answer(std::span<const uint8_t> hello) {
    other_ = wire::decode_hello(hello);
    if (other_.purpose != purpose_) throw Exception(ErrorKind::kAuth, "a hello of another purpose");
    theirs_.assign(hello.begin(), hello.end());
    return authenticate(own_key_, {own_, theirs_});
  }
  /// Checks the responder's proof. Throws `auth` if the responder does not know the secret.
  void check(std::span<const uint8_t> proof) const;

 private:
  wire::HelloPurpose purpose_;
};

/// The side that accepted the connection.
class Responder : public Side {
 public:
  /// `hello` is from the initiator. `credentials` are this rank's, for the purpose of `hello`.
  Responder(const Credentials& credentials, const wire::Hello& hello)
      : Side(credentials, hello.purpose, "responder", "initiator") {
    other_ = hello;
    theirs_ = wire::encode(hello);
  }
  /// Returns the proof to send. Throws `auth` if `proof`, the initiator's, is wrong.
  wire::Proof check(std::span<const uint8_t> proof) const;
};

/// Returns an error if `other`, which has proved the secret, belongs to another job or generation.
std::optional<Error> mismatch(const Identity& self, const wire::Hello& other);
/// Returns a text that explains why this rank does not trust `other`, and what the user can do.
std::string why_not_trusted(const Identity& self, const wire::Hello& other);
/// Returns the only error that this rank sends to a peer without a valid proof.
Error refusal_without_reason();

}  // namespace distrain::membership
