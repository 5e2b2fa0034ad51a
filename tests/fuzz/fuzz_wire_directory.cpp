#include "../unit/wire/decoders.h"

// The decoder checks itself (decoders.h); whatever it does not take it has to refuse as `protocol`.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    static_cast<void>(distrain::wire::try_directory({data, size}));
  } catch (const distrain::base::Exception& e) {
    if (e.kind() != distrain::base::ErrorKind::kProtocol) __builtin_trap();
  }
  return 0;
}
