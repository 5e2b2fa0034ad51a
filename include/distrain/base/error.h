#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace distrain::base {

/// What went wrong, as a value that crosses the wire. No code matches on an error's text.
/// The numbers are part of the wire format: append, never renumber.
enum class ErrorKind : uint16_t {
  kInternal = 1,
  kInvalid = 2,       ///< a wrong argument or option
  kRendezvous = 3,    ///< the ranks could not be brought together
  kAuth = 4,          ///< a wrong token
  kProtocol = 5,      ///< bytes that are not ours: magic, version, malformed frame
  kPeerLost = 6,      ///< a rank died, stopped or was cut off
  kRemoteFailed = 7,  ///< a user function threw on the rank that ran it
  kBadData = 8,       ///< an unreadable data set or checkpoint
  kNotFinite = 9,     ///< a NaN or infinite loss
  kResources = 10,    ///< no memory, disk, file descriptor, device
  kOverloaded = 11,   ///< a cap of ours was reached
  kDeadline = 12,     ///< a call's deadline passed
  kNotFound = 13,     ///< no such function, worker or object
  kCancelled = 14,    ///< given up because this side is closing
};

/// `peer_lost`, `bad_data`, … as it stands in the JSON `error` line.
std::string_view kind_name(ErrorKind kind);

/// The process exit code of the command line for this kind of error.
int exit_code(ErrorKind kind);

/// True for the numbers above; a peer may send anything.
bool is_known_kind(uint16_t value);

struct Error {
  ErrorKind kind = ErrorKind::kInternal;
  std::string message{};
  int32_t rank = -1;  ///< the rank that caused it, -1 when not known
  std::string op{};   ///< the function or phase it happened in, may be empty
};

/// `Error` as an exception. The API throws nothing else for failures of the runtime.
class Exception : public std::runtime_error {
 public:
  explicit Exception(Error error) : std::runtime_error(error.message), error_(std::move(error)) {}
  Exception(ErrorKind kind, std::string message) : Exception(Error{kind, std::move(message)}) {}

  const Error& error() const { return error_; }
  ErrorKind kind() const { return error_.kind; }

 private:
  Error error_;
};

/// Throws an `Exception` of kind kInvalid.
[[noreturn]] void invalid(std::string message);
/// The same of kind kBadData.
[[noreturn]] void bad_data(std::string message);

/// In a catch block: the error of the exception in flight, or `otherwise` with its text.
Error current_error(ErrorKind otherwise);

}  // namespace distrain::base
