// Declares the only fuzz target of fuzz_wire that is not in targets.cpp.
#pragma once

#include "../target.h"

namespace distrain::fuzz {

extern const Target kStream;  // stream.cpp

}  // namespace distrain::fuzz
