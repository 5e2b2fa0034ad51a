#include "proof.h"

#include "distrain/membership/rank_text.h"
#include "distrain/wire/frame.h"

namespace distrain::membership {

namespace {

Key key_of(const std::string& side, wire::HelloPurpose purpose, std::string_view secret) {
  return derive_key(secret, (purpose == wire::HelloPurpose::kJoin ? "join " : "peer ") + side);
}

wire::Bytes new_hello(const Identity& self, wire::HelloPurpose purpose) {
  wire::Hello hello{purpose,          self.trust,  self.rank, self.generation,
                    self.incarnation, self.job_id, {}};
  fill_random(hello.nonce);
  return wire::encode(hello);
}

std::string short_text(const wire::JobId& id) {
  return hex({reinterpret_cast<const char*>(id.data()), 4});
}

bool is_other_generation(const Identity& self, const wire::Hello& other) {
  const bool any =
      other.generation == wire::kAnyGeneration || self.generation == wire::kAnyGeneration;
  return other.generation != self.generation && !any;
}

std::string both_generations(const Identity& self, const wire::Hello& other) {
  return "of generation " + std::to_string(other.generation) + ", " + rank_text(self.rank) +
         " of " + std::to_string(self.generation);
}

// A late message of an earlier generation has no valid proof, but it names its generation.
std::string claimed_generation(const Identity& self, const wire::Hello& other) {
  if (!is_other_generation(self, other)) return {};
  return " (it says that it is " + both_generations(self, other) + ")";
}

void check_proof(const Key& key, const wire::Bytes& first, const wire::Bytes& second,
                 std::span<const uint8_t> proof) {
  if (is_equal(authenticate(key, {first, second}), wire::decode_proof(proof))) return;
  throw Exception(ErrorKind::kAuth, "a proof that does not fit");
}

}  // namespace

Initiator::Initiator(const Credentials& credentials, wire::HelloPurpose purpose)
    : purpose_(purpose),
      own_key_(key_of("initiator", purpose, credentials.secret)),
      other_key_(key_of("responder", purpose, credentials.secret)),
      own_(new_hello(credentials.self, purpose)) {}

wire::Proof Initiator::answer(std::span<const uint8_t> hello) {
  other_ = wire::decode_hello(hello);
  if (other_.purpose != purpose_) {
    throw Exception(ErrorKind::kAuth, "a hello of another purpose");
  }
  theirs_.assign(hello.begin(), hello.end());
  return authenticate(own_key_, {own_, theirs_});
}

void Initiator::check(std::span<const uint8_t> proof) const {
  check_proof(other_key_, own_, theirs_, proof);
}

Responder::Responder(const Credentials& credentials, const wire::Hello& hello)
    : other_(hello),
      own_key_(key_of("responder", hello.purpose, credentials.secret)),
      other_key_(key_of("initiator", hello.purpose, credentials.secret)),
      own_(new_hello(credentials.self, hello.purpose)),
      theirs_(wire::encode(hello)) {}

wire::Proof Responder::check(std::span<const uint8_t> proof) const {
  check_proof(other_key_, theirs_, own_, proof);
  return authenticate(own_key_, {theirs_, own_});
}

std::optional<Error> mismatch(const Identity& self, const wire::Hello& other) {
  const auto refuse = [&](std::string message) {
    return Error{ErrorKind::kRendezvous, std::move(message), self.rank, "join"};
  };
  const std::string who = rank_text(other.rank);
  const std::string own = rank_text(self.rank);
  constexpr wire::JobId kNone{};
  if (other.job_id != self.job_id && other.job_id != kNone && self.job_id != kNone) {
    return refuse(who + " belongs to job " + short_text(other.job_id) + ", " + own + " to " +
                  short_text(self.job_id) +
                  ": give all ranks of a job the same --job-id, and each job its own port");
  }
  if (is_other_generation(self, other)) {
    return refuse(
        who + " is " + both_generations(self, other) +
        (other.generation < self.generation ? ": the job has been started again since" : ""));
  }
  return std::nullopt;
}

std::string why_not_trusted(const Identity& self, const wire::Hello& other) {
  using enum wire::Trust;
  const std::string it = rank_text(other.rank);
  if (other.purpose == wire::HelloPurpose::kPeer) {
    return it + " does not know the secret of this job's ranks" + claimed_generation(self, other);
  }
  if (other.trust != self.trust) {
    const std::string own = rank_text(self.rank);
    if (other.trust == kToken) {
      return it + " has a token, " + own + " has none: start it with the same --token-file";
    }
    if (self.trust == kToken) {
      return it + " has no token, " + own + " has one: start it with the same --token-file";
    }
    const bool is_it = other.trust == kAnybody;
    return (is_it ? it : own) + " was started with --insecure, " + (is_it ? own : it) +
           " was not: start all ranks alike";
  }
  if (self.trust == kToken) {
    return it + " has another token than " + rank_text(self.rank) +
           claimed_generation(self, other) + ": start both with the same --token-file";
  }
  if (self.trust == kAnybody) return it + " has sent a proof that was damaged on the way";
  return it +
         " is no process of this user on this host. Ranks of several hosts or users need a token: "
         "make one with `(umask 077; head -c 32 /dev/urandom | base64 > job.token)`, copy it to "
         "each host, and start every rank with --token-file job.token --rank N --master-addr HOST, "
         "where HOST is the address of rank 0";
}

Error refusal_without_reason() {
  return {ErrorKind::kProtocol,
          "refused; this side speaks protocol version " + std::to_string(wire::kProtocolVersion)};
}

}  // namespace distrain::membership
