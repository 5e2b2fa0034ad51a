#pragma once

#include <optional>
#include <tuple>
#include <variant>

#include <c10/core/Scalar.h>

#include "distrain/base/error.h"
#include "distrain/rpc/message.h"
#include "distrain/wire/codec.h"

namespace distrain::rpc {

class DeviceTable;
class RRefContext;

/// Encodes values into a message.
struct Encoder {
  explicit Encoder(OutMessage& m, RRefContext* context = nullptr,
                   const DeviceTable* table = nullptr, int reader = -1)
      : message(m), out(m.body), rrefs(context), devices(table), to(reader) {}

  void put_tensor(const at::Tensor& tensor);

  OutMessage& message;
  wire::Writer out;
  RRefContext* rrefs;          ///< of the sending agent
  const DeviceTable* devices;  ///< of the sending agent; null if only CPU tensors can be sent
  int to;                      ///< the rank that will read the message
  bool is_argument = false;    ///< the message is a call, not a reply
  /// Objects that the sender of a call keeps alive until the call is answered.
  std::vector<std::shared_ptr<const void>> holds;
};

/// Decodes values from a message. Throws `protocol` if the bytes do not encode the type.
struct Decoder {
  explicit Decoder(InMessage& m) : message(m), in(m.body) {}

  at::Tensor get_tensor();

  InMessage& message;
  wire::Reader in;
  size_t next_tensor = 0;
};

/// Specialised for each type that can be sent: tensors, at::Scalar, arithmetic types, enums,
/// strings; vector, array, tuple, pair, optional, variant, set, unordered_set, map and
/// unordered_map of these; RRef<T> (rref.h); and structs that list their fields:
///
///   struct Point { double x, y; static constexpr auto kFields = std::tuple(&Point::x, &Point::y);
///   };
template <class T>
struct Serializer;

template <class T>
concept Serializable = requires(Encoder& encoder, Decoder& decoder, const T& value) {
  Serializer<T>::encode(encoder, value);
  { Serializer<T>::decode(decoder) } -> std::convertible_to<T>;
};

template <class T>
void encode(Encoder& encoder, const T& value) {
  static_assert(Serializable<T>, "this type cannot be sent: see distrain/rpc/serialize.h");
  Serializer<T>::encode(encoder, value);
}

template <class T>
T decode(Decoder& decoder) {
  static_assert(Serializable<T>, "this type cannot be received: see distrain/rpc/serialize.h");
  return Serializer<T>::decode(decoder);
}

namespace detail {

/// A std::tuple, std::pair or std::array.
template <class T>
concept IsTuple = requires {
  std::tuple_size<T>::value;
};

}  // namespace detail

template <>
struct Serializer<at::Tensor> {
  static void encode(Encoder& encoder, const at::Tensor& value) { encoder.put_tensor(value); }
  static at::Tensor decode(Decoder& decoder) { return decoder.get_tensor(); }
};

template <wire::Scalar T>
struct Serializer<T> {
  static void encode(Encoder& encoder, T value) { encoder.out.put(value); }
  static T decode(Decoder& decoder) { return decoder.in.get<T>(); }
};

template <>
struct Serializer<std::string> {
  static void encode(Encoder& encoder, const std::string& value) { encoder.out.put(value); }
  static std::string decode(Decoder& decoder) { return std::string(decoder.in.get_string()); }
};

template <>
struct Serializer<base::Unit> {
  static void encode(Encoder&, const base::Unit&) {}
  static base::Unit decode(Decoder&) { return {}; }
};

template <>
struct Serializer<at::Scalar> {
  static void encode(Encoder& encoder, const at::Scalar& value);
  static at::Scalar decode(Decoder& decoder);
};

/// Encodes a standard container: the number of items, then the items.
template <class Items>
requires requires(Items items, typename Items::value_type item) {
  items.insert(items.end(), std::move(item));
}
struct Serializer<Items> {
  using Item = typename Items::value_type;
  static void encode(Encoder& encoder, const Items& value) {
    encoder.out.put(static_cast<uint32_t>(value.size()));
    for (const Item& item : value) rpc::encode<Item>(encoder, item);
  }
  static Items decode(Decoder& decoder) {
    // Refuses a count above the number of remaining bytes, because an item takes at least one.
    const uint32_t count = decoder.in.get_count(1);
    Items value;
    for (uint32_t i = 0; i < count; ++i) value.insert(value.end(), rpc::decode<Item>(decoder));
    return value;
  }
};

/// Encodes tuples, pairs and arrays. Their members may be const, as the key of a map's item is.
template <detail::IsTuple T>
struct Serializer<T> {
  static void encode(Encoder& encoder, const T& value) {
    std::apply([&](const auto&... items) { (rpc::encode(encoder, items), ...); }, value);
  }
  static T decode(Decoder& decoder) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      // Uses braces, because they guarantee evaluation from left to right.
      return T{rpc::decode<std::remove_const_t<std::tuple_element_t<I, T>>>(decoder)...};
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  }
};

template <class T>
struct Serializer<std::optional<T>> {
  static void encode(Encoder& encoder, const std::optional<T>& value) {
    encoder.out.put(value.has_value());
    if (value) rpc::encode<T>(encoder, *value);
  }
  static std::optional<T> decode(Decoder& decoder) {
    if (!decoder.in.get<bool>()) return std::nullopt;
    return rpc::decode<T>(decoder);
  }
};

template <class... Ts>
struct Serializer<std::variant<Ts...>> {
  using Value = std::variant<Ts...>;
  static void encode(Encoder& encoder, const Value& value) {
    encoder.out.put(static_cast<uint8_t>(value.index()));
    std::visit([&](const auto& item) { rpc::encode(encoder, item); }, value);
  }
  static Value decode(Decoder& decoder) {
    const auto index = decoder.in.get<uint8_t>();
    std::optional<Value> value;
    uint8_t i = 0;
    ((i++ == index ? value.emplace(rpc::decode<Ts>(decoder)), 0 : 0), ...);
    if (!value) wire::Reader::fail("an unknown alternative of a variant");
    return *std::move(value);
  }
};

template <class T>
requires requires { T::kFields; }
struct Serializer<T> {
  static void encode(Encoder& encoder, const T& value) {
    std::apply([&](auto... field) { (rpc::encode(encoder, value.*field), ...); }, T::kFields);
  }
  static T decode(Decoder& decoder) {
    T value{};
    const auto decode_to = [&]<class Field>(Field& field) { field = rpc::decode<Field>(decoder); };
    std::apply([&](auto... field) { (decode_to(value.*field), ...); }, T::kFields);
    return value;
  }
};

}  // namespace distrain::rpc
