#include "proof.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include <fmt/ranges.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <unistd.h>

#include "distrain/membership/loss.h"
#include "distrain/wire/frame.h"

namespace distrain::membership {
namespace {

// Makes a parameter. The const_cast is safe, because OpenSSL only reads the parameter.
OSSL_PARAM text(const char* name, const char* value) {
  return OSSL_PARAM_construct_utf8_string(name, const_cast<char*>(value), 0);
}
OSSL_PARAM octets(const char* name, std::string_view bytes) {
  return OSSL_PARAM_construct_octet_string(name, const_cast<char*>(bytes.data()), bytes.size());
}

void require(bool worked, const char* what) {
  if (worked) return;
  throw base::Exception(base::ErrorKind::kInternal, std::string("OpenSSL: ") + what + " failed");
}

// Note [OpenSSL at exit]
//
// OpenSSL frees its data in an exit() handler, while threads of an agent that is destroyed later,
// or never, may still use it. OPENSSL_INIT_NO_ATEXIT, which omits that handler, has no effect if
// the program has initialized OpenSSL before. So a handler that is registered after OpenSSL's, and
// therefore runs before it, waits until no thread is inside OpenSSL and makes later calls throw
// `cancelled`.
struct Gate {
  std::shared_timed_mutex mutex;
  std::atomic<bool> is_closed{false};  // read with the mutex held
};

Gate& gate() {
  static Gate& only = []() -> Gate& {
    // Makes OpenSSL register its exit handler before ours. OpenSSL does so only if given an option.
    require(OPENSSL_init_crypto(OPENSSL_INIT_LOAD_CRYPTO_STRINGS, nullptr) == 1, "its set-up");
    std::atexit([] {
      gate().is_closed = true;  // first, so that no new thread delays the lock below
      // Waits with a timeout, because a forked child lacks the threads that would unlock the mutex.
      const std::unique_lock lock(gate().mutex, std::chrono::seconds(1));
    });
    return *new Gate;  // never destroyed, because threads may use it
  }();
  return only;
}

std::shared_lock<std::shared_timed_mutex> enter() {
  std::shared_lock lock(gate().mutex);
  if (!gate().is_closed) return lock;
  throw base::Exception(base::ErrorKind::kCancelled, "this process is about to end");
}

Key key_of(const std::string& side, wire::HelloPurpose purpose, std::string_view secret) {
  using enum wire::HelloPurpose;
  const char* const use = purpose == kJoin ? "join " : purpose == kPeer ? "peer " : "bulk ";
  return derive_key(secret, use + side);
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

// Returns a text with both generations if they differ, because that may explain an invalid proof.
std::string claimed_generation(const Identity& self, const wire::Hello& other) {
  if (!is_other_generation(self, other)) return {};
  return " (it says that it is " + both_generations(self, other) + ")";
}

void check_proof(const Key& key, const wire::Bytes& first, const wire::Bytes& second,
                 std::span<const uint8_t> proof) {
  const wire::Proof expected = authenticate(key, {first, second});
  const wire::Proof given = wire::decode_proof(proof);
  if (CRYPTO_memcmp(expected.data(), given.data(), given.size()) == 0) return;  // in constant time
  throw Exception(ErrorKind::kAuth, "a proof that does not fit");
}

}  // namespace

void set_up_openssl() { gate(); }

void fill_random(std::span<uint8_t> out) {
  if (getentropy(out.data(), out.size()) == 0) return;
  throw base::Exception(base::ErrorKind::kResources, "the system has no random bytes");
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  fill_random({reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()});
  return bytes;
}

std::string hex(std::string_view bytes) {
  return fmt::format("{:02x}", fmt::join(std::vector<uint8_t>(bytes.begin(), bytes.end()), ""));
}

Key derive_key(std::string_view secret, std::string_view use) {
  const auto inside = enter();
  if (secret.empty()) secret = std::string_view("\0", 1);  // OpenSSL refuses an empty key
  const std::unique_ptr<EVP_KDF, decltype(&EVP_KDF_free)> kdf(
      EVP_KDF_fetch(nullptr, "HKDF", nullptr), &EVP_KDF_free);
  require(kdf != nullptr, "HKDF");
  const std::unique_ptr<EVP_KDF_CTX, decltype(&EVP_KDF_CTX_free)> context(
      EVP_KDF_CTX_new(kdf.get()), &EVP_KDF_CTX_free);
  require(context != nullptr, "HKDF");
  const OSSL_PARAM params[] = {text(OSSL_KDF_PARAM_DIGEST, "SHA256"),
                               octets(OSSL_KDF_PARAM_KEY, secret),
                               octets(OSSL_KDF_PARAM_SALT, "distrain"),
                               octets(OSSL_KDF_PARAM_INFO, use), OSSL_PARAM_construct_end()};
  Key key{};
  require(EVP_KDF_derive(context.get(), key.data(), key.size(), params) == 1, "HKDF");
  return key;
}

wire::Proof authenticate(const Key& key, std::initializer_list<std::span<const uint8_t>> parts) {
  const auto inside = enter();
  wire::Bytes all;
  for (const std::span<const uint8_t> part : parts) all.insert(all.end(), part.begin(), part.end());
  wire::Proof proof{};
  size_t size = 0;
  const bool worked = EVP_Q_mac(nullptr, "HMAC", nullptr, "SHA256", nullptr, key.data(), key.size(),
                                all.data(), all.size(), proof.data(), proof.size(), &size);
  require(worked && size == proof.size(), "HMAC");
  return proof;
}

wire::JobId job_id_of(std::string_view name) {
  const auto inside = enter();
  std::array<uint8_t, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  require(EVP_Digest(name.data(), name.size(), digest.data(), &size, EVP_sha256(), nullptr) == 1,
          "SHA-256");
  wire::JobId id{};
  std::copy_n(digest.begin(), id.size(), id.begin());
  return id;
}

Side::Side(const Credentials& credentials, wire::HelloPurpose purpose, const char* own,
           const char* other)
    : own_key_(key_of(own, purpose, credentials.secret)),
      other_key_(key_of(other, purpose, credentials.secret)),
      own_(new_hello(credentials.self, purpose)) {}

void Initiator::check(std::span<const uint8_t> proof) const {
  check_proof(other_key_, own_, theirs_, proof);
}

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
  if (other.purpose != wire::HelloPurpose::kJoin) {
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
