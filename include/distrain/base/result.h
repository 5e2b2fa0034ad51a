#pragma once

#include <utility>
#include <variant>

#include "distrain/base/error.h"

namespace distrain::base {

/// A value in place of `void`: `Result<Unit>`, `Future<Unit>`.
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
  const T& value() const {
    if (!ok()) throw Exception(error());
    return unchecked();
  }

 private:
  std::variant<T, Error> state_;
};

using Status = Result<Unit>;

}  // namespace distrain::base
