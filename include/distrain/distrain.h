#pragma once

// All that a job or a program with an Agent of its own needs, LibTorch's modules included. CUDA's
// headers are not among them: a job needs none. Single headers compile faster.

#include <ATen/Functions.h>
#include <torch/nn.h>

#include "distrain/app/main.h"
#include "distrain/autograd/context.h"
#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/data/batches.h"
#include "distrain/data/images.h"
#include "distrain/data/stream.h"
#include "distrain/data/text.h"
#include "distrain/data/tokens.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/job/predictions.h"
#include "distrain/job/single_process_training.h"
#include "distrain/job/training.h"
#include "distrain/nn/module.h"
#include "distrain/nn/pipeline.h"
#include "distrain/nn/remote_module.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/single_process_optimizer.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/rref.h"
#include "distrain/table/sharded_embedding.h"
