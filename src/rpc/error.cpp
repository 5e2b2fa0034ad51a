#include "distrain/rpc/error.h"

#include <c10/util/Exception.h>

namespace distrain::rpc {

base::Error error_in_flight(base::ErrorKind otherwise) {
  try {
    throw;
  } catch (const c10::OutOfMemoryError& e) {
    // The first sentence names the failed operation and the size. The rest of the text gives hints.
    const std::string text = e.what_without_backtrace();
    return base::Error{base::ErrorKind::kResources, text.substr(0, text.find(". "))};
  } catch (const c10::AcceleratorError& e) {  // the first line of its text is the error
    const std::string text = e.what_without_backtrace();
    return base::Error{base::ErrorKind::kResources, text.substr(0, text.find('\n'))};
  } catch (const c10::Error& e) {
    return base::Error{otherwise, e.what_without_backtrace()};
  } catch (...) {
    return base::current_error(otherwise);
  }
}

}  // namespace distrain::rpc
