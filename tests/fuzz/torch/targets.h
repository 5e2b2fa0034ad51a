// The fuzz targets that need LibTorch.
#pragma once

#include "../target.h"

namespace distrain::fuzz {

extern const Target kMessage;      // message.cpp
extern const Target kTrace;        // trace.cpp
extern const Target kCollective;   // collective.cpp
extern const Target kManifest;     // manifest.cpp
extern const Target kGzip;         // idx.cpp
extern const Target kIdx;          // idx.cpp
extern const Target kSafetensors;  // safetensors.cpp

}  // namespace distrain::fuzz
