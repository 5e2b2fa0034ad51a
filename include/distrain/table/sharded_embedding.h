#pragma once

#include <memory>
#include <string>
#include <vector>

#include "distrain/optim/step_target.h"
#include "distrain/table/table_server.h"

namespace distrain::table {

class LookupPlan;

enum class Pooling : uint8_t { kNone, kSum, kMean };

struct Query {
  int table = 0;   ///< index in the constructor's `tables`
  at::Tensor ids;  ///< int64, of any shape; with pooling of shape [n]
  /// With pooling: int64 [bags], the index in `ids` where each bag starts, as torch's EmbeddingBag.
  at::Tensor offsets{};
  at::Tensor weights{};  ///< with kSum: float [n], which multiply the rows, and may want gradients
  Pooling pooling = Pooling::kNone;
};

struct LookupSettings {
  /// Type of rows and gradients in messages: kFloat, kBFloat16 or kHalf.
  at::ScalarType wire_dtype = at::kFloat;
  /// Lets servers add the rows of a bag if that moves fewer bytes. Evaluations never do so, so that
  /// their results do not depend on the number of servers.
  bool pools_on_servers = true;
};

/// Embedding tables whose rows are spread over several ranks (servers) by the hash of their ids.
///
///     auto tables = std::make_shared<table::ShardedEmbedding>(agent, servers, options, sharing);
///     optimizer->add(tables);                                  // a DistributedOptimizer
///     const at::Tensor pooled = tables->bags(ids, offsets);    // within an autograd::Context
///     autograd::backward(context, {loss(pooled)});
///     optimizer->step(context);
///
/// A lookup is not part of the distributed graph: the rows arrive as a leaf of this rank's graph.
/// optimizer.step() sends the gradients of all lookups of its contexts in one message to each
/// server, and does not wait for the update. So an error of an update is thrown by the next lookup,
/// the next step or settle(), which must follow the last step. After the error all steps fail: make
/// a new object, in sync mode when all participants have destroyed theirs. A lookup includes the
/// steps that this rank made before start() and, in sync mode, those of all participants: see Note
/// [Steps of tables].
///
/// Within a NoGradGuard a lookup is an evaluation: it makes no rows, and unknown ids have their
/// initial values. Rows are floats on the CPU. Lookups are thread-safe; steps are made one by one.
class ShardedEmbedding final : public optim::StepTarget {
 public:
  struct Lookup;
  using Pending = std::shared_ptr<Lookup>;  ///< a lookup that has been sent

  /// Opens the tables on `servers`, whose order all ranks must agree on. Modes are kAsync and
  /// kSync. A kOnlooker makes no steps. Throws `invalid` if the tables are open with other options.
  ShardedEmbedding(rpc::Agent& agent, std::vector<int> servers, std::vector<TableOptions> tables,
                   optim::Sharing sharing, LookupSettings settings = {});
  /// Opens tables of `server` in this process, for a SingleProcessOptimizer or for evaluations.
  ShardedEmbedding(std::shared_ptr<TableServer> server, std::vector<TableOptions> tables);
  /// Closes the tables, as Agent::shutdown() does. In sync mode the steps of the other participants
  /// then fail with `peer_lost`. Leaves the tables open if an exception unwinds the stack, so that
  /// the other participants get that exception's error, which the agent aborts with.
  ~ShardedEmbedding() override;

  /// Returns the rows of `ids` in table 0, [..., dim].
  at::Tensor forward(const at::Tensor& ids) { return look_up({{0, ids}})[0]; }
  /// Returns the pooled rows of bags of table 0, [bags, dim].
  at::Tensor bags(const at::Tensor& ids, const at::Tensor& offsets, const at::Tensor& weights = {},
                  Pooling pooling = Pooling::kSum) {
    return look_up({{0, ids, offsets, weights, pooling}})[0];
  }
  /// Answers all queries by one call to each server.
  std::vector<at::Tensor> look_up(const std::vector<Query>& queries) {
    return finish(start(queries));
  }

  /// Sends the requests of look_up(), so that the rows travel while this rank computes. Needs no
  /// current context. Destroying the result gives up the lookup.
  Pending start(const std::vector<Query>& queries);
  /// Waits for the rows. Throws `invalid` if gradients are enabled and there is no current context,
  /// if another object started the lookup, or if in sync mode a step was made after start().
  std::vector<at::Tensor> finish(Pending lookup);
  /// Returns how many steps of this rank were made between start() and finish() of the last lookup.
  int64_t staleness() const;

  // For checkpoints.
  std::vector<std::string> table_names() const {
    std::vector<std::string> names;
    for (const TableOptions& table : tables_) names.push_back(table.name);
    return names;
  }
  const std::vector<int>& servers() const;
  /// Returns the server if it is of this process alone; otherwise null.
  const std::shared_ptr<TableServer>& local_server() const;

  // Called by optimizers. norm() and apply() are of the step of the last check().
  std::string where() const override;
  void check(const std::vector<uint64_t>& contexts) override;
  base::Future<optim::Norms> norm(const std::vector<uint64_t>& contexts,
                                  const optim::NormArguments& arguments) override;
  base::Future<uint64_t> apply(const std::vector<uint64_t>& contexts,
                               const optim::StepOptions& options) override;
  bool only_sends() const override;
  uint64_t gather() override;
  /// Waits until the servers have applied the last step. Throws the error of a step that failed.
  void settle() override;

 private:
  struct Client;
  struct LeftOpen;
  struct PreparedStep;

  std::vector<std::shared_ptr<Lookup>> take_lookups(uint64_t context);
  at::Tensor checked(const LookupPlan& plan, const at::Tensor& gradient) const;
  double norm_squared() const;
  std::vector<base::Future<optim::Norms>> push(PushRequest request, const PreparedStep& step);

  const std::vector<TableOptions> tables_;
  const optim::Sharing sharing_;
  const LookupSettings settings_;
  const std::shared_ptr<Client> client_;  // shared with lookups in contexts
  std::unique_ptr<PreparedStep> step_;    // of check()
  std::unique_ptr<PreparedStep> pushed_;  // of apply(); servers keep its lookups until settle()
  std::vector<base::Future<optim::Norms>> pushing_;
};

}  // namespace distrain::table
