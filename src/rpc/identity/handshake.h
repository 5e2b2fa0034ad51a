#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "distrain/base/error.h"
#include "distrain/wire/handshake.h"
#include "identity/keys.h"

namespace distrain::rpc::identity {

// Note [Identity]
//
// Who is at the other end of a connection, before anything is believed of it. Each end says who it
// is in a hello with a fresh nonce, then shows that it knows the key, the initiator first.
//
//   proof of a side = HMAC-SHA256(key of that side, the initiator's hello · the responder's hello)
//   key of a side   = HKDF-SHA256(secret, "join initiator", "peer responder", …)
//
// Both hellos are in what is proved, byte by byte: version, purpose, trust, rank, generation,
// incarnation, job and nonce. So no field can be changed on the way; a proof of another connection
// does not fit, as its nonces are others; and one that is sent back to its maker does not fit
// either, as the sides have keys of their own.
//
// What the secret of a connection to rank 0 (join) is depends on what ranks trust:
//
//   token      the job's token, which only its ranks know
//   same user  none. The kernel says whose process is at the other end: of a unix socket by
//              SO_PEERCRED, of TCP by the owner of the peer's socket, which is then one of this
//              host and this network namespace. Each side looks.
//   anybody    none (--insecure)
//
// Of a connection between two ranks (peer) it is the directory's secret and the token: rank 0 has
// made that secret for this job, and gives it to ranks that have proved themselves.
//
// Besides its own hello, which is no secret, a responder tells a stranger nothing but the protocol
// version: refusal(). A proved rank of another job or generation hears why: mismatch().

/// What a rank says of itself in every hello.
struct Self {
  int rank = 0;
  wire::Trust trust = wire::Trust::kSameUser;
  uint32_t generation = 0;   ///< wire::kAnyGeneration: not known yet
  wire::JobId job_id{};      ///< zero: not known yet
  uint32_t incarnation = 0;  ///< of the rank; rank 0 says which, so 0 where it joins
};

/// What one side of a connection proves itself with.
struct Credentials {
  Self self;
  std::string secret;  ///< may be empty
};

/// The side that connects. Not thread-safe.
class Initiator {
 public:
  Initiator(const Credentials& credentials, wire::HelloPurpose purpose);

  /// What it begins with.
  const wire::Bytes& hello() const { return own_; }
  /// Takes the other side's hello, and gives back what is to be said to it. `protocol` for bytes
  /// that are no hello, `auth` for a hello that does not answer this one.
  wire::Proof answer(std::span<const uint8_t> hello);
  /// Takes the other side's proof. `auth` if it is none: the other side does not know the secret.
  void check(std::span<const uint8_t> proof) const;

  /// Who the other side says it is; believed once check() has returned.
  const wire::Hello& other() const { return other_; }

 private:
  const wire::HelloPurpose purpose_;
  const Key own_key_;
  const Key other_key_;
  wire::Bytes own_;
  wire::Bytes theirs_;
  wire::Hello other_;
};

/// The side that is connected to. Not thread-safe.
class Responder {
 public:
  /// `hello` is what the other side has said; the credentials are those for its purpose.
  Responder(const Credentials& credentials, const wire::Hello& hello);

  /// What it answers.
  const wire::Bytes& hello() const { return own_; }
  /// Takes the other side's proof, and gives back its own. `auth` if it is none.
  wire::Proof check(std::span<const uint8_t> proof) const;

  const wire::Hello& other() const { return other_; }

 private:
  const wire::Hello other_;
  const Key own_key_;
  const Key other_key_;
  wire::Bytes own_;
  wire::Bytes theirs_;
};

/// Why two sides that know the same secret are not of the same job after all, if they are not: of
/// `self`, which is rank 0 if the purpose is to join, and of `other`.
std::optional<base::Error> mismatch(const Self& self, const wire::Hello& other);

/// Why `other` is not believed (its proof, or its trust), and what its user is to do.
std::string why_not_believed(const Self& self, const wire::Hello& other);

/// All that a stranger hears.
base::Error refusal();

}  // namespace distrain::rpc::identity
