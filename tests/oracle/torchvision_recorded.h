// Values of torchvision 0.26.0, printed by tests/python/resnet.py record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace distrain::oracle {

struct RecordedResNet {
  const char* model;
  size_t parameters;
  uint64_t
      parameters_hash;  ///< FNV-1a of "name[sizes]\n" of each parameter, in order, without blanks
  size_t buffers;
  uint64_t buffers_hash;
  std::vector<double> evaluated;  ///< scores [2, 10] of two images of 64 x 64
  std::vector<double> trained;
  std::vector<double> gradient_norms;  ///< of kGradientNames, for labels 3 and 7
  double running_sum;                  ///< sum of |running statistics| after the training pass
};

inline constexpr const char* kGradientNames[] = {"conv1.weight", "layer1.0.bn1.bias",
                                                 "layer3.0.downsample.0.weight", "fc.bias"};

inline const RecordedResNet kRecordedResNets[] = {
    {"resnet18",
     62,
     0x7aa435199e9f8236,
     60,
     0x3af65117ae9949cb,
     {-0.49024631, -0.37044425, 0.39788126,  0.7177983,   0.37714961,   -0.44823576, -0.65554102,
      0.43821028,  -0.03560245, 0.24078361,  -0.41924218, -0.27300542,  0.34885561,  0.72136367,
      0.41216013,  -0.44153062, -0.66710408, 0.47720534,  -0.087548612, 0.27414394},
     {-0.071226158, -1.0033433,  0.20528478,  0.37102485,   -0.1755077, -1.5998264, -0.29277088,
      0.30595904,   -0.38793453, 1.0955984,   -0.085666448, -1.1188947, 0.51249217, 0.75654003,
      0.14931953,   -1.0336276,  -0.61136578, -0.093598021, 0.30092548, 1.0030698},
     {15.94593, 1.5920442, 3.0820389, 0.61961272},
     5041.3629},
    {"resnet50",
     161,
     0x7cd397c6d05627d7,
     159,
     0x5d38e2f4ab988266,
     {-0.32092343, -1.3525595,   0.48663743,   0.62371383,  -0.20308253, 0.008329179, -0.04738689,
      -0.13797605, 0.30801949,   0.23882674,   -0.31929968, -1.3410361,  0.48037398,  0.63792262,
      -0.20072982, 0.0083304425, -0.046325677, -0.14715294, 0.30687893,  0.22717823},
     {-0.93123941, -1.6667256,  0.89817884,  0.22431288,  -0.35169521, -0.53137109, -0.83604063,
      -1.0234446,  -0.26600146, 0.72371942,  -0.55257199, -1.2362677,  0.63318855,  0.57630884,
      0.3505925,   -0.46706403, -0.81253963, 0.036165905, -0.94325768, 0.52049717},
     {595.16037, 47.425601, 48.111445, 0.64544734},
     28152.71},
};

}  // namespace distrain::oracle
