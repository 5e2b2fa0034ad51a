#include "keys.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include <fmt/ranges.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <unistd.h>

namespace distrain::membership {

namespace {

// OpenSSL takes pointers to non-const, although it only reads these parameters.
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
    // With no option at all, OpenSSL would not register its handler.
    require(OPENSSL_init_crypto(OPENSSL_INIT_LOAD_CRYPTO_STRINGS, nullptr) == 1, "its set-up");
    std::atexit([] {
      gate().is_closed = true;  // first, so that no new thread delays the lock below
      // With a timeout, because threads inside OpenSSL do not exist in a forked process.
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

bool is_equal(const wire::Proof& a, const wire::Proof& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
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

}  // namespace distrain::membership
