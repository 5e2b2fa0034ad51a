#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace distrain::base {

/// The kind of an error. Code tests the kind, never the message. The numbers are part of the wire
/// format: append new kinds, never renumber.
enum class ErrorKind : uint16_t {
  kInternal = 1,
  kInvalid = 2,       ///< a wrong argument or option
  kRendezvous = 3,    ///< the ranks could not find or accept each other
  kAuth = 4,          ///< authentication failed, for example because of a wrong token
  kProtocol = 5,      ///< unexpected bytes: wrong magic, wrong version, malformed frame
  kPeerLost = 6,      ///< a rank died, stopped responding or was disconnected
  kRemoteFailed = 7,  ///< a user function threw on the rank that ran it
  kBadData = 8,       ///< an unreadable data set or checkpoint
  kNotFinite = 9,     ///< a training loss that is NaN or infinite
  kResources = 10,    ///< out of memory, disk space, file descriptors or devices
  kOverloaded = 11,   ///< a limit of the runtime was reached
  kDeadline = 12,     ///< a call's deadline passed
  kNotFound = 13,     ///< no such function, worker or object
  kCancelled = 14,    ///< cancelled by the user, or because this side is closing
};

/// Returns the name of `kind`, for example `peer_lost`, as printed in the JSON `error` line.
std::string_view kind_name(ErrorKind kind);
/// Returns the exit code with which the command-line program reports an error of this kind.
int exit_code(ErrorKind kind);
/// Returns true if `value`, which a peer may have sent, is the number of an ErrorKind.
bool is_known_kind(uint16_t value);

struct Error {
  ErrorKind kind = ErrorKind::kInternal;
  std::string message{};
  int32_t rank = -1;  ///< the rank that caused the error; -1 if unknown
  std::string op{};   ///< the function or phase that failed; may be empty
};

/// Returns `error` with its rank and operation set to `rank` and `op` if they were missing.
inline Error with_origin(Error error, int rank, const std::string& op = {}) {
  if (error.rank < 0) error.rank = rank;
  if (error.op.empty()) error.op = op;
  return error;
}

/// An exception that carries an Error. Every failure of the runtime is thrown as this type.
class Exception : public std::runtime_error {
 public:
  explicit Exception(Error error) : std::runtime_error(error.message), error_(std::move(error)) {}
  Exception(ErrorKind kind, std::string message) : Exception(Error{kind, std::move(message)}) {}

  const Error& error() const { return error_; }
  ErrorKind kind() const { return error_.kind; }

 private:
  Error error_;
};

// These functions throw an `Exception`: invalid() of kind kInvalid, bad_data() of kind kBadData.
[[noreturn]] void invalid(std::string message);
[[noreturn]] void bad_data(std::string message);
/// Called in a catch block. Returns the caught exception as an Error, whose kind is `otherwise` if
/// the type of the exception does not determine a kind.
Error current_error(ErrorKind otherwise);

/// Stands for `void` where a type needs a value, as in `Result<Unit>`.
struct Unit {};

/// A value or an error. (GCC 12 in C++20 mode has no std::expected.)
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  const Error& error() const { return std::get<1>(state_); }
  T& unchecked() { return *std::get_if<0>(&state_); }
  const T& unchecked() const { return *std::get_if<0>(&state_); }
  /// Returns the value; throws the error as an `Exception` if there is no value.
  T& value() {
    if (!ok()) throw Exception(error());
    return unchecked();
  }
  const T& value() const { return const_cast<Result*>(this)->value(); }

 private:
  std::variant<T, Error> state_;
};

using Status = Result<Unit>;

}  // namespace distrain::base
