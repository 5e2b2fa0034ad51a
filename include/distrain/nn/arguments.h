#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "distrain/rpc/serialize.h"

namespace distrain::nn {

// Arguments of a function that the sender knows only by name. Each argument is sent with its type.
// The receiver converts numbers to the parameter's type; other types must match.
//
// On the wire: u32 count, then for each argument: u8 kind · type name (kOther only) · value.

enum class ArgumentKind : uint8_t { kBool = 0, kInteger = 1, kReal = 2, kText = 3, kOther = 4 };

namespace detail {

/// Throws `invalid` because argument `number` (from 1) is `given`, not of type `wanted`.
[[noreturn]] void refuse_argument(size_t number, const std::string& given,
                                  const std::type_info& wanted);
[[noreturn]] void refuse_count(size_t given, size_t wanted);
std::string kind_name(ArgumentKind kind);
std::string type_name(std::string_view mangled);

template <class T>
void encode_argument(rpc::Encoder& encoder, const T& value) {
  const auto put = [&encoder]<class As>(ArgumentKind kind, const As& as) {
    encoder.out.put(static_cast<uint8_t>(kind));
    rpc::encode<As>(encoder, as);
  };
  if constexpr (std::is_same_v<T, bool>) {
    put(ArgumentKind::kBool, value);
  } else if constexpr (std::is_integral_v<T>) {
    put(ArgumentKind::kInteger, static_cast<int64_t>(value));
  } else if constexpr (std::is_floating_point_v<T>) {
    put(ArgumentKind::kReal, static_cast<double>(value));
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    put(ArgumentKind::kText, std::string(std::string_view(value)));
  } else {
    encoder.out.put(static_cast<uint8_t>(ArgumentKind::kOther));
    encoder.out.put(std::string(typeid(T).name()));
    rpc::encode<T>(encoder, value);
  }
}

template <class T>
T decode_argument(rpc::Decoder& decoder, size_t number) {
  const auto kind = static_cast<ArgumentKind>(decoder.in.get<uint8_t>());
  constexpr bool kTakesInteger = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;
  if (kind == ArgumentKind::kOther) {
    const std::string type(decoder.in.get_string());
    if constexpr (!std::is_arithmetic_v<T> && !std::is_same_v<T, std::string>) {
      if (type == typeid(T).name()) return rpc::decode<T>(decoder);
    }
    refuse_argument(number, type_name(type), typeid(T));
  }
  if constexpr (std::is_same_v<T, bool>) {
    if (kind == ArgumentKind::kBool) return decoder.in.get<bool>();
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (kind == ArgumentKind::kText) return rpc::decode<std::string>(decoder);
  } else if constexpr (kTakesInteger) {
    if (kind == ArgumentKind::kInteger) {
      const auto value = decoder.in.get<int64_t>();
      if constexpr (std::is_integral_v<T>) {
        // A uint64 is sent as the int64 with the same bits, so any value fits a 64-bit T.
        if (sizeof(T) < sizeof(value) && !std::in_range<T>(value)) {
          refuse_argument(number, std::to_string(value), typeid(T));
        }
      }
      return static_cast<T>(value);
    }
    if constexpr (std::is_floating_point_v<T>) {
      if (kind == ArgumentKind::kReal) return static_cast<T>(decoder.in.get<double>());
    }
  }
  refuse_argument(number, kind_name(kind), typeid(T));
}

}  // namespace detail

template <class... Args>
void encode_arguments(rpc::Encoder& encoder, const Args&... args) {
  encoder.out.put(static_cast<uint32_t>(sizeof...(Args)));
  (detail::encode_argument(encoder, args), ...);
}

/// Throws `invalid` if the number or the types of the arguments do not match `Ts`.
template <class... Ts>
std::tuple<Ts...> decode_arguments(rpc::Decoder& decoder) {
  const auto count = decoder.in.get<uint32_t>();
  if (count != sizeof...(Ts)) detail::refuse_count(count, sizeof...(Ts));
  const auto decode = [&decoder]<size_t... I>(std::index_sequence<I...>) {
    // A braced list is evaluated from left to right, which is the order of encoding.
    return std::tuple<Ts...>{detail::decode_argument<Ts>(decoder, I + 1)...};
  };
  auto values = decode(std::index_sequence_for<Ts...>());
  decoder.in.expect_end();
  return values;
}

}  // namespace distrain::nn
