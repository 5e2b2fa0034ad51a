#include "distrain/rpc/token.h"

#include "identity/keys.h"

namespace distrain::rpc {

std::string new_token() {
  std::string token = identity::random_bytes(32);
  static_cast<void>(identity::authenticate(identity::derive(token, "set up"), {}));
  return token;
}

std::string new_unix_name() { return "@distrain-" + identity::hex(identity::random_bytes(16)); }

}  // namespace distrain::rpc
