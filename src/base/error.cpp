#include "distrain/base/error.h"

#include <utility>

namespace distrain::base {

std::string_view kind_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInternal:
      return "internal";
    case ErrorKind::kInvalid:
      return "invalid";
    case ErrorKind::kRendezvous:
      return "rendezvous";
    case ErrorKind::kAuth:
      return "auth";
    case ErrorKind::kProtocol:
      return "protocol";
    case ErrorKind::kPeerLost:
      return "peer_lost";
    case ErrorKind::kRemoteFailed:
      return "remote_failed";
    case ErrorKind::kBadData:
      return "bad_data";
    case ErrorKind::kNotFinite:
      return "not_finite";
    case ErrorKind::kResources:
      return "resources";
    case ErrorKind::kOverloaded:
      return "overloaded";
    case ErrorKind::kDeadline:
      return "deadline";
    case ErrorKind::kNotFound:
      return "not_found";
    case ErrorKind::kCancelled:
      return "cancelled";
  }
  return "internal";
}

int exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalid:
      return 2;
    case ErrorKind::kRendezvous:
      return 3;
    case ErrorKind::kAuth:
    case ErrorKind::kProtocol:
      return 4;
    case ErrorKind::kPeerLost:
      return 5;
    case ErrorKind::kRemoteFailed:
      return 6;
    case ErrorKind::kBadData:
      return 7;
    case ErrorKind::kNotFinite:
      return 8;
    case ErrorKind::kResources:
    case ErrorKind::kOverloaded:
      return 9;
    case ErrorKind::kDeadline:
      return 10;
    case ErrorKind::kInternal:
    case ErrorKind::kNotFound:
    case ErrorKind::kCancelled:
      return 1;
  }
  return 1;
}

bool is_known_kind(uint16_t value) {
  return value >= static_cast<uint16_t>(ErrorKind::kInternal) &&
         value <= static_cast<uint16_t>(ErrorKind::kCancelled);
}

void invalid(std::string message) { throw Exception(ErrorKind::kInvalid, std::move(message)); }

void bad_data(std::string message) { throw Exception(ErrorKind::kBadData, std::move(message)); }

Error current_error(ErrorKind otherwise) {
  try {
    throw;
  } catch (const Exception& e) {
    return e.error();
  } catch (const std::bad_alloc&) {
    return Error{ErrorKind::kResources, "out of memory"};
  } catch (const std::exception& e) {
    return Error{otherwise, e.what()};
  } catch (...) {
    return Error{otherwise, "an exception that is not a std::exception"};
  }
}

}  // namespace distrain::base
