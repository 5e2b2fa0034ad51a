#include "distrain/nn/arguments.h"

#include <c10/util/Type.h>

#include "distrain/base/error.h"

namespace distrain::nn::detail {

std::string type_name(std::string_view mangled) {
  return c10::demangle(std::string(mangled).c_str());
}

std::string kind_name(ArgumentKind kind) {
  switch (kind) {
    case ArgumentKind::kBool:
      return "a bool";
    case ArgumentKind::kInteger:
      return "an integer";
    case ArgumentKind::kReal:
      return "a floating-point number";
    case ArgumentKind::kText:
      return "a text";
    case ArgumentKind::kOther:
      break;
  }
  return "of an unknown kind";
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
