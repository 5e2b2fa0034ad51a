// The target of this program that has its own file.
#pragma once

#include "../target.h"

namespace distrain::fuzz {

extern const Target kStream;  // stream.cpp

}  // namespace distrain::fuzz
