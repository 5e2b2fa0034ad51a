#include "distrain/nn/arguments.h"

#include <array>

#include <c10/util/Type.h>

#include "distrain/base/error.h"

namespace distrain::nn::detail {

std::string type_name(std::string_view mangled) {
  return c10::demangle(std::string(mangled).c_str());
}

std::string kind_name(ArgumentKind kind) {
  constexpr std::array kNames = {"a bool", "an integer", "a floating-point number", "a text"};
  const auto number = static_cast<size_t>(kind);
  return number < kNames.size() ? kNames[number] : "of an unknown kind";
}

void refuse_argument(size_t number, const std::string& given, const std::type_info& wanted) {
  base::invalid("argument " + std::to_string(number) + " is " + given + ", not " +
                type_name(wanted.name()));
}

void refuse_count(size_t given, size_t wanted) {
  base::invalid("it is made with " + std::to_string(wanted) + " arguments, not " +
                std::to_string(given));
}

}  // namespace distrain::nn::detail
