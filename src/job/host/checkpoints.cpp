#include "distrain/job/checkpoints.h"

#include <csignal>
#include <filesystem>
#include <system_error>

#include <c10/util/ScopeExit.h>
#include <pthread.h>
#include <unistd.h>

#include "host/table_parts.h"

namespace distrain::job {

// The file of the vocabulary, in addition to the files `model`, `optimizer` and `state`.
constexpr const char* kVocabulary = "vocabulary";

Part part_of(rpc::NamedTensors live, std::string file) {
  Part part = part_of_each([live = std::move(live)](int) { return live; });
  part.file = std::move(file);
  part.each_own = false;
  return part;
}

Part part_of_each(std::function<rpc::NamedTensors(int trainer)> live) {
  const auto take = [live](int trainer) { return store::copies_on_host(live(trainer)); };
  const auto give = [live](int trainer, const rpc::NamedTensors& saved) {
    store::copy_into(live(trainer), saved);
  };
  return {{.file = "state", .each_own = true}, /*once=*/false, take, give};
}

Part part_of_words(const std::map<std::string, std::vector<std::string>>& lists) {
  rpc::NamedTensors texts;
  for (const auto& [name, words] : lists) texts[name] = store::tensor_of_words(words);
  Part part = part_of(std::move(texts), kVocabulary);
  part.once = true;
  return part;
}

namespace {

constexpr const char* kSuffix = ".safetensors";

// Throws if the job would add its checkpoints to those of another run or to newer ones.
void refuse_strangers(const CheckpointOptions& options) {
  if (options.resume == "auto") return;
  const auto newest = store::CheckpointStore::newest(options.dir);
  if (!newest) return;
  const std::string& resume = options.resume;
  if (!resume.empty() && store::CheckpointStore::holds(options.dir, resume)) {
    const std::string named = std::filesystem::weakly_canonical(resume);
    const std::string name = std::filesystem::path(*newest).filename();
    if (named == std::filesystem::weakly_canonical(options.dir) || named.ends_with(name)) return;
    base::invalid("--resume " + resume + " is older than " + name + " in --checkpoint " +
                  options.dir + ": name a new folder to save in, or remove the newer ones first");
  }
  base::invalid("--checkpoint " + options.dir + " holds another run's checkpoints (" + *newest +
                "): --resume auto goes on from it, or name a new folder");
}

}  // namespace

// Checks parts that are too small for torch to use several threads, because training needs them.
void check_finite(const std::string& name, const at::Tensor& piece, int64_t step) {
  constexpr int64_t kElements = 16'384;
  if (!piece.is_floating_point()) return;
  for (const at::Tensor& part : piece.split(kElements)) {
    if (part.isfinite().all().item<bool>()) continue;
    throw base::Exception(base::ErrorKind::kNotFinite,
                          name + " is not finite at step " + std::to_string(step) +
                              ", so it was not saved: try a smaller --lr");
  }
}

std::optional<std::string> Snapshot::option(const std::string& name) const {
  for (const auto& [part, key] : {std::pair("options", name), std::pair("agreed", "--" + name)}) {
    const auto values = state.find(part);
    if (values == state.end() || !values->is_object()) {
      refuse("it does not say its options: it is of an older version of distrain");
    }
    const auto value = values->find(key);
    if (value != values->end() && value->is_string()) return value->get<std::string>();
  }
  return std::nullopt;
}

void Snapshot::expect_option(const std::string& name, const std::string& value,
                             const std::string& initial, const std::string& otherwise) const {
  const std::string saved = option(name).value_or(initial);
  // The number of trainers of streams may change; TrainingHost checks it.
  const bool may_change = name == "trainers" && state.value("position", Json()).contains("streams");
  if (saved == value || may_change) return;
  refuse((saved.empty()   ? "saved without --" + name + ", not with " + value
          : value.empty() ? "saved with --" + name + " " + saved + ", not without"
                          : "saved with --" + name + " " + saved + ", not " + value) +
         ": leave --" + name + " out" + otherwise);
}

std::vector<std::string> Snapshot::words(const std::string& list) const {
  const auto file = files.find(kVocabulary);
  if (file == files.end() || !file->second.tensors().contains(list)) {
    refuse("its model was not trained on text (--data FILE)");
  }
  const at::Tensor text = file->second.tensor(list);
  if (text.scalar_type() != at::kByte) refuse("its words are no text");
  return store::words_of_tensor(text);
}

Snapshot read_checkpoint(const std::string& path, const char* use, store::Depth depth) {
  store::LoadedCheckpoint loaded;
  try {
    loaded = store::CheckpointStore::load(path, depth);
  } catch (const base::Exception& e) {
    if (e.kind() != base::ErrorKind::kBadData) throw;
    const auto before = store::CheckpointStore::intact_before(path);
    if (!before) throw;
    base::bad_data(e.error().message + "; the one before it is intact: " + use + ' ' + *before);
  }
  Snapshot snapshot{{loaded.path, loaded.step, std::move(loaded.state), loaded.hash}};
  for (auto& [name, file] : loaded.files) {
    if (file.tensors().empty()) continue;
    snapshot.files.emplace(name.substr(0, name.rfind(kSuffix)), std::move(file));
  }
  return snapshot;
}

std::optional<std::string> checkpoint_to_resume(const CheckpointOptions& options) {
  if (options.resume == "auto") return store::CheckpointStore::newest(options.dir);
  return options.resume.empty() ? std::nullopt : std::optional(options.resume);
}

const store::SafetensorsFile& Snapshot::file(const std::string& name) const {
  const auto it = files.find(name);
  if (it == files.end()) refuse("no " + name + kSuffix);
  return it->second;
}

HeldTensor HeldTensor::of(const std::string& name, const at::Tensor& tensor, bool trained) {
  const at::Tensor flat = tensor.detach().contiguous().view(-1);
  return {{name, tensor.scalar_type(), tensor.sizes().vec()},
          trained,
          [flat](int64_t first, int64_t count) {
            const rpc::NamedTensors piece{{"", flat.narrow(0, first, count)}};
            return base::Future<at::Tensor>::ready(store::on_host(piece).at(""));
          }};
}

struct Checkpoints::Save {
  Content content;
  std::function<void(Content&)> fill;
  base::TimePoint since;
  std::unique_ptr<store::Saving> saving{};
  std::optional<base::Error> error{};  // of begin()
  double held_s = 0;
  std::shared_ptr<base::Tracer> tracer;
  base::Promise<void> done;
};

Checkpoints::Checkpoints(CheckpointOptions options, const Job& job, EventSink& sink, Failed failed,
                         TableParts* tables)
    : options_(std::move(options)),
      sink_(sink),
      failed_(std::move(failed)),
      before_save_(job.inject.before_save),
      device_(job.device()),
      tables_(tables) {
  if (options_.dir.empty() || options_.read_only) return;
  // Kills this process at system call number `at` of its first save, if `at` is not 0.
  auto each_call = [this, at = job.inject.fail_checkpoint](const char*) {
    sink_.saving();
    if (in_first_save_ && ++calls_ == at) kill(getpid(), SIGKILL);
  };
  store_ = std::make_unique<store::CheckpointStore>(options_.dir, each_call, options_.keep);
  store_->prepare();
  refuse_strangers(options_);
  if (const auto reason = store_->why_no_lock()) {
    sink_.warn(base::ErrorKind::kResources, "--checkpoint " + options_.dir + " cannot be locked (" +
                                                *reason +
                                                "): see to it that no other job saves there");
  }
}

std::optional<Snapshot> Checkpoints::load(const char* use) {
  const auto path = checkpoint_to_resume(options_);
  if (!path) return std::nullopt;
  const auto started = base::Clock::now();
  Snapshot snapshot = read_checkpoint(*path, use);
  last_good_ = snapshot.path;
  sink_.emit("checkpoint", {{"action", "loaded"},
                            {"path", snapshot.path},
                            {"step", snapshot.step},
                            {"wall_s", base::seconds_since(started)}});
  return snapshot;
}

void Checkpoints::save(Content content, std::function<void(Content&)> fill, base::TimePoint since) {
  if (thread_.joinable()) thread_.join();
  Save save{std::move(content), std::move(fill), since};
  if (tables_ && !tables_->empty()) {
    try {
      begin(save);
    } catch (...) {
      save.error = rpc::error_in_flight(base::ErrorKind::kInternal);
    }
  }
  save.held_s = base::seconds_since(since);
  save.tracer = base::Tracer::of_thread();
  const base::Future<void> done = save.done.future();
  const auto shared = std::make_shared<Save>(std::move(save));
  try {
    thread_ = std::jthread([this, shared] {
      pthread_setname_np(pthread_self(), "checkpoint");
      rpc::make_current(device_);
      run(*shared);
    });
  } catch (const std::system_error& e) {
    if (tables_) tables_->abandon();  // before the folder is removed
    throw base::Exception(base::ErrorKind::kResources,
                          std::string("no thread to save a checkpoint: ") + e.what());
  }
  std::lock_guard lock(mutex_);
  idle_ = done;
}

void Checkpoints::run(Save& save) {
  const base::TraceBinding binding(std::move(save.tracer), "checkpoint");
  std::optional<base::Error> error;
  try {
    const base::TraceScope scope("save");
    write(save);
  } catch (...) {
    error = base::current_error(base::ErrorKind::kInternal);
  }
  save.saving.reset();  // if it has failed, removes the temporary folder
  const int64_t step = std::exchange(save.content, {}).step;  // frees the tensors
  save.fill = {};
  const bool lacks_resources = error && error->kind == base::ErrorKind::kResources;
  if (lacks_resources) {
    error->message = "saving step " + std::to_string(step) + " in " + options_.dir +
                     " failed: " + error->message +
                     (last_good_.empty() ? "; there is no earlier checkpoint"
                                         : "; the last good checkpoint is " + last_good_);
  }
  if (lacks_resources && options_.on_save_error != "stop") {
    sink_.warn(error->kind, error->message + "; the job goes on and tries its next save");
  } else if (error && failed_) {
    failed_(*error);
  }
  {
    std::lock_guard lock(mutex_);
    error_ = std::move(error);
  }
  save.done.set();
}

void Checkpoints::begin(Save& save) {
  in_first_save_ = last_saved().empty();
  save.saving = store_->begin(save.content.step, save.content.state);
  if (!tables_ || tables_->empty()) return;
  save.saving->state()["tables"] = tables_->begin(*save.saving, save.content.step);
}

void Checkpoints::write(Save& save) {
  const int64_t step = save.content.step;
  TableParts* const tables = tables_ && !tables_->empty() ? tables_ : nullptr;
  // On an error, no server may write any more when the folder of `save.saving` is removed.
  auto on_error = c10::make_scope_exit([tables] {
    if (tables) tables->abandon();
  });
  while (before_save_ && before_save_()) sink_.saving();
  if (save.error) throw base::Exception(*save.error);
  if (!save.saving) begin(save);
  if (save.fill) save.fill(save.content);
  for (auto& [file, tensors] : save.content.files) {
    write_file(*save.saving, file + kSuffix, std::exchange(tensors, {}), step);
  }
  const double stalled_s = tables ? tables->finish(*save.saving) : 0;
  const std::string path = last_good_ = save.saving->commit();
  in_first_save_ = false;
  on_error.release();
  {
    std::lock_guard lock(mutex_);
    last_saved_ = "checkpoint saved in " + path + ", step " + std::to_string(step);
  }
  Json fields{{"action", "saved"},
              {"path", path},
              {"step", step},
              {"wall_s", base::seconds_since(save.since)},
              {"held_s", save.held_s}};
  if (tables) fields["stalled_s"] = stalled_s;
  sink_.emit("checkpoint", fields);
}

// Writes the tensors piece by piece. Requests a piece before it writes the one before.
void Checkpoints::write_file(store::Saving& saving, const std::string& name,
                             std::vector<HeldTensor> tensors, int64_t step) const {
  std::ranges::sort(tensors, {}, [](const HeldTensor& each) { return each.info.name; });
  std::vector<store::TensorInfo> infos;
  for (const HeldTensor& each : tensors) infos.push_back(each.info);
  store::OutputFile file = saving.create(name, infos);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const HeldTensor held = std::move(tensors[i]);  // so that its owner frees it when it is written
    const auto size = static_cast<int64_t>(c10::elementSize(held.info.dtype));
    const int64_t all = static_cast<int64_t>(held.info.bytes) / size;
    const int64_t most = static_cast<int64_t>(store::kPieceBytes) / size;
    const auto read = [&](int64_t first) { return held.read(first, std::min(most, all - first)); };
    base::Future<at::Tensor> next;
    for (int64_t first = 0; first < all; first += most) {
      const at::Tensor piece = (first == 0 ? read(0) : std::move(next)).take().contiguous();
      if (piece.scalar_type() != held.info.dtype || piece.numel() != std::min(most, all - first)) {
        throw base::Exception(base::ErrorKind::kInternal, held.info.name + " has changed");
      }
      if (first + most < all) next = read(first + most);
      if (held.trained) check_finite(held.info.name, piece.view(-1), step);
      file.write_at(infos[i].offset + static_cast<uint64_t>(first * size),
                    {static_cast<const uint8_t*>(piece.const_data_ptr()), piece.nbytes()});
    }
  }
  saving.add(name, file);
}

}  // namespace distrain::job
