#include "distrain/base/error.h"

#include <iterator>
#include <system_error>

namespace distrain::base {
namespace {

struct Kind {
  ErrorKind kind;
  std::string_view name;
  int exit_code;
};

// Ordered by the number of ErrorKind, which starts at 1: the first entry describes kind 1.
constexpr Kind kKinds[] = {
    {ErrorKind::kInternal, "internal", 1},          {ErrorKind::kInvalid, "invalid", 2},
    {ErrorKind::kRendezvous, "rendezvous", 3},      {ErrorKind::kAuth, "auth", 4},
    {ErrorKind::kProtocol, "protocol", 4},          {ErrorKind::kPeerLost, "peer_lost", 5},
    {ErrorKind::kRemoteFailed, "remote_failed", 6}, {ErrorKind::kBadData, "bad_data", 7},
    {ErrorKind::kNotFinite, "not_finite", 8},       {ErrorKind::kResources, "resources", 9},
    {ErrorKind::kOverloaded, "overloaded", 9},      {ErrorKind::kDeadline, "deadline", 10},
    {ErrorKind::kNotFound, "not_found", 1},         {ErrorKind::kCancelled, "cancelled", 1},
};

// Returns the entry of `kind`, or the entry of kInternal if `kind` is unknown.
const Kind& entry_of(ErrorKind kind) {
  const auto number = static_cast<uint16_t>(kind);
  return kKinds[is_known_kind(number) ? number - 1 : 0];
}

}  // namespace

std::string_view kind_name(ErrorKind kind) { return entry_of(kind).name; }
int exit_code(ErrorKind kind) { return entry_of(kind).exit_code; }
bool is_known_kind(uint16_t value) { return value >= 1 && value <= std::size(kKinds); }
void invalid(std::string message) { throw Exception(ErrorKind::kInvalid, std::move(message)); }
void bad_data(std::string message) { throw Exception(ErrorKind::kBadData, std::move(message)); }

Error current_error(ErrorKind otherwise) {
  try {
    throw;
  } catch (const Exception& e) {
    return e.error();
  } catch (const std::bad_alloc&) {
    return Error{ErrorKind::kResources, "out of memory"};
  } catch (const std::system_error& e) {
    if (e.code() != std::errc::resource_unavailable_try_again) return Error{otherwise, e.what()};
    return Error{ErrorKind::kResources,
                 "no thread can be started: is ulimit -v or ulimit -u too small?"};
  } catch (const std::exception& e) {
    return Error{otherwise, e.what()};
  } catch (...) {
    return Error{otherwise, "an exception that is not a std::exception"};
  }
}

}  // namespace distrain::base
