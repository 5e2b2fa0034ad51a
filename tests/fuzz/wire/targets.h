// The target of this program that has a file of its own.
#pragma once

#include "../target.h"

namespace distrain::fuzz {

extern const Target kStream;  // stream.cpp

}  // namespace distrain::fuzz
