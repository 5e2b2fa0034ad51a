#pragma once

#include <functional>
#include <string>

#include "distrain/base/error.h"
#include "support/catch.h"

namespace distrain::optim {

/// Returns the message of the `invalid` error that `call` throws.
inline std::string invalid_message(const std::function<void()>& call) {
  try {
    call();
  } catch (const base::Exception& exception) {
    CHECK(exception.kind() == base::ErrorKind::kInvalid);
    return exception.error().message;
  }
  FAIL("no error");
  return {};
}

}  // namespace distrain::optim
