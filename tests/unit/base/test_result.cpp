// Tests the small types of base: Result, Error, UniqueFunction and the clock.
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/executor.h"
#include "support/catch.h"

using namespace distrain::base;

namespace {

constexpr ErrorKind kAllKinds[] = {
    ErrorKind::kInternal,  ErrorKind::kInvalid,   ErrorKind::kRendezvous,   ErrorKind::kAuth,
    ErrorKind::kProtocol,  ErrorKind::kPeerLost,  ErrorKind::kRemoteFailed, ErrorKind::kBadData,
    ErrorKind::kNotFinite, ErrorKind::kResources, ErrorKind::kOverloaded,   ErrorKind::kDeadline,
    ErrorKind::kNotFound,  ErrorKind::kCancelled,
};

}  // namespace

TEST_CASE("a Result holds a value or an error") {
  Result<int> value = 7;
  CHECK(value.ok());
  CHECK(static_cast<bool>(value));
  CHECK(value.value() == 7);
  value.value() = 8;
  CHECK(std::as_const(value).unchecked() == 8);

  const Result<int> error = Error{ErrorKind::kDeadline, "too late", 3, "scale"};
  CHECK_FALSE(error.ok());
  CHECK(error.error().rank == 3);
  try {
    static_cast<void>(error.value());
    FAIL("no exception");
  } catch (const Exception& e) {
    CHECK(e.kind() == ErrorKind::kDeadline);
    CHECK(std::string(e.what()) == "too late");
    CHECK(e.error().op == "scale");
    CHECK(e.error().rank == 3);
  }
}

TEST_CASE("a Result holds a move-only value") {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(5);
  const std::unique_ptr<int> taken = std::move(result.value());
  CHECK(*taken == 5);
}

TEST_CASE("error kinds have the exit codes and wire numbers that are documented") {
  const int codes[] = {1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 9, 10, 1, 1};
  const char* const names[] = {"internal",   "invalid",   "rendezvous",    "auth",
                               "protocol",   "peer_lost", "remote_failed", "bad_data",
                               "not_finite", "resources", "overloaded",    "deadline",
                               "not_found",  "cancelled"};
  for (size_t i = 0; i < std::size(kAllKinds); ++i) {
    CHECK(static_cast<uint16_t>(kAllKinds[i]) == i + 1);
    CHECK(is_known_kind(static_cast<uint16_t>(i + 1)));
    CHECK(exit_code(kAllKinds[i]) == codes[i]);
    CHECK(kind_name(kAllKinds[i]) == names[i]);
  }
  CHECK_FALSE(is_known_kind(0));
  CHECK_FALSE(is_known_kind(std::size(kAllKinds) + 1));
  CHECK_FALSE(is_known_kind(65535));
  CHECK(exit_code(static_cast<ErrorKind>(999)) == 1);
}

TEST_CASE("current_error translates our exceptions, those of std and others") {
  const auto error_of = [](auto thrown) {
    try {
      throw thrown;
    } catch (...) {
      return current_error(ErrorKind::kRemoteFailed);
    }
  };
  const Error own = error_of(Exception(Error{ErrorKind::kAuth, "no", 4, "join"}));
  CHECK(own.kind == ErrorKind::kAuth);
  CHECK(own.rank == 4);
  CHECK(own.op == "join");
  CHECK(error_of(std::runtime_error("boom")).kind == ErrorKind::kRemoteFailed);
  CHECK(error_of(std::runtime_error("boom")).message == "boom");
  CHECK(error_of(std::bad_alloc()).kind == ErrorKind::kResources);
  CHECK(error_of(42).kind == ErrorKind::kRemoteFailed);
  CHECK_FALSE(error_of(42).message.empty());
}

TEST_CASE("a UniqueFunction owns a move-only callable and destroys it") {
  auto value = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = value;
  UniqueFunction<int(int)> f = [own = std::make_unique<std::shared_ptr<int>>(std::move(value))](
                                   int add) { return **own += add; };
  CHECK(f(2) == 3);
  UniqueFunction<int(int)> g = std::move(f);
  CHECK_FALSE(f);  // NOLINT: moved from on purpose
  CHECK(g(2) == 5);
  g = UniqueFunction<int(int)>();
  CHECK(watch.expired());
}

TEST_CASE("a UniqueFunction<void()> takes a function and ignores its result") {
  int calls = 0;
  UniqueFunction<void()> f = [&calls] { return ++calls; };
  f();
  CHECK(calls == 1);
}

TEST_CASE("a UniqueFunction passes references and move-only arguments through") {
  int n = 1;
  UniqueFunction<void(int&, std::unique_ptr<int>)> f = [](int& to, std::unique_ptr<int> add) {
    to += *add;
  };
  f(n, std::make_unique<int>(4));
  CHECK(n == 5);
}

TEST_CASE("a deadline beyond the range of the clock is never reached") {
  CHECK(deadline_after(std::chrono::nanoseconds::max()) == kNever);
  const TimePoint before = Clock::now();
  const TimePoint soon = deadline_after(std::chrono::milliseconds(5));
  CHECK(soon >= before + std::chrono::milliseconds(5));
  CHECK(soon < before + std::chrono::hours(1));
  CHECK(deadline_after(std::chrono::seconds(-1)) < Clock::now());
}
