#include "distrain/membership/token.h"

#include "keys.h"

namespace distrain::membership {

std::string new_token() {
  std::string token = random_bytes(32);
  static_cast<void>(authenticate(derive_key(token, "set up"), {}));
  return token;
}

std::string new_unix_name() { return "@distrain-" + hex(random_bytes(16)); }

}  // namespace distrain::membership
