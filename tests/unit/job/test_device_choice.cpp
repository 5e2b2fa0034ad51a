#include "distrain/base/error.h"
#include "distrain/job/device_choice.h"
#include "support/catch.h"

using namespace distrain;
using job::DeviceRole;
using job::DeviceSpec;
using testing::contains;

namespace {

const std::vector<DeviceRole> kRoles = {{"trainer", "", DeviceRole::Use::kCompute},
                                        {"worker", "stage", DeviceRole::Use::kCompute},
                                        {"ps", "server", DeviceRole::Use::kCompute},
                                        {"master", "", DeviceRole::Use::kIfNamed},
                                        {"observer", "", DeviceRole::Use::kNone}};
const c10::Device kCpu = c10::kCPU;
const c10::Device kAny = c10::kCUDA;

c10::Device gpu(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

DeviceSpec spec(const std::string& text) { return {text, kRoles}; }

std::string refusal(const std::string& text) {
  try {
    spec(text);
  } catch (const base::Exception& e) {
    CHECK(e.kind() == base::ErrorKind::kInvalid);
    return e.error().message;
  }
  return "no error";
}

std::function<int()> gpus(int count) {
  return [count] {
    if (count > 0) return count;
    throw base::Exception(base::ErrorKind::kResources, "no GPU");
  };
}

}  // namespace

TEST_CASE("one device applies to all roles that compute") {
  CHECK(spec("cpu").of("trainer0") == kCpu);
  CHECK(spec("cuda").of("trainer0") == kAny);
  CHECK(spec("cuda").of("ps") == kAny);
  CHECK(spec("cuda:1").of("worker12") == gpu(1));
  CHECK(spec("cuda:1").of("master") == kCpu);
  CHECK(spec("cuda").of("observer1") == kCpu);
  CHECK(spec("cuda").for_all() == kAny);
}

TEST_CASE("devices are chosen per role, by name, class or alias") {
  const DeviceSpec some = spec("server=cpu,trainer=cuda,trainer1=cuda:3,master=cuda:0");
  CHECK(some.of("ps") == kCpu);
  CHECK(some.of("trainer0") == kAny);
  CHECK(some.of("trainer1") == gpu(3));
  CHECK(some.of("trainer11") == kAny);
  CHECK(some.of("master") == gpu(0));
  CHECK(some.of("worker1") == kCpu);  // a role without a device
  CHECK_FALSE(some.named("worker1"));
  CHECK(some.named("ps") == kCpu);
  CHECK_FALSE(some.for_all());
  CHECK(spec("stage2=cuda:1,stage=cuda:0").of("worker2") == gpu(1));
  CHECK(spec("stage2=cuda:1,stage=cuda:0").of("worker1") == gpu(0));
}

TEST_CASE("an invalid device, an unknown role and a repeated role are refused") {
  for (const char* text : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:128", "cuda:99999999999",
                           "CUDA", "cuda:1 ", "mps", "meta", "cpu:0"}) {
    CAPTURE(text);
    CHECK(contains(refusal(text), std::string("not '") + text + "'"));
  }
  CHECK(contains(refusal("trainer=gpu"), "not 'gpu'"));
  CHECK(contains(refusal("trainer="), "not ''"));
  CHECK(contains(refusal("trainer=cuda,cpu"), "'cpu' has none"));
  CHECK(contains(refusal("trainer=cuda,"), "ROLE=DEVICE"));
  CHECK(contains(refusal("teacher=cuda"), "'teacher', but there are trainer"));
  CHECK(contains(refusal("=cuda"), "names the role ''"));
  CHECK(contains(refusal("7=cuda"), "names the role '7'"));
  CHECK(contains(refusal("ps=cpu,server=cuda"), "names server twice"));
  CHECK(contains(refusal("observer=cuda"), "computes nothing"));
  CHECK(spec("observer=cpu,trainer=cuda").of("observer1") == kCpu);
}

TEST_CASE("a named rank must be a rank of the job") {
  const DeviceSpec some = spec("trainer=cuda,trainer2=cpu");
  CHECK_NOTHROW(some.check_ranks({"trainer1", "trainer2"}));
  CHECK_THROWS_AS(some.check_ranks({"trainer0", "trainer1"}), base::Exception);
}

TEST_CASE("a device without an index gets the rank's local index") {
  CHECK(resolve_device(kCpu, gpus(0), 0) == c10::Device(c10::kCPU));
  CHECK(resolve_device(kAny, gpus(2), 0) == c10::Device(c10::kCUDA, 0));
  CHECK(resolve_device(kAny, gpus(2), 1) == c10::Device(c10::kCUDA, 1));
  CHECK(resolve_device(kAny, gpus(2), 5) == c10::Device(c10::kCUDA, 1));
  CHECK(resolve_device(gpu(1), gpus(2), 0) == c10::Device(c10::kCUDA, 1));
}

TEST_CASE("a missing device is an error that names the rank") {
  const auto error_of = [](c10::Device choice, int count) {
    try {
      job::naming_rank(2, "trainer1", [&] {
        return std::vector<c10::Device>{resolve_device(choice, gpus(count), 0)};
      });
    } catch (const base::Exception& e) {
      return e.error();
    }
    return base::Error();
  };
  base::Error error = error_of(gpu(2), 2);
  CHECK(error.kind == base::ErrorKind::kResources);
  CHECK(error.rank == 2);
  CHECK(error.message ==
        "rank 2 (trainer1): there is no cuda:2 on this host, only cuda:0 to cuda:1");
  error = error_of(gpu(1), 1);
  CHECK(contains(error.message, "only cuda:0"));
  error = error_of(kAny, 0);
  CHECK(error.kind == base::ErrorKind::kResources);
  CHECK(error.message == "rank 2 (trainer1): no GPU");
}
