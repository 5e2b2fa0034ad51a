#include "distrain/membership/slot.h"

#include <unistd.h>

#include "control_plane.h"

namespace distrain::membership {
namespace {

constexpr uint16_t kFirstPort = 20000;  // below the kernel's ephemeral ports
constexpr uint16_t kPorts = 9000;

bool is_loopback_name(const std::string& host) {
  return host == "localhost" || host == "::1" || host == "[::1]" || host.starts_with("127.");
}

}  // namespace

std::string meeting_name(const std::string& job_id, const std::string& master_addr, uint16_t port) {
  std::string what = std::to_string(geteuid()) + ' ' + std::to_string(port) + ' ';
  what += !job_id.empty()                 ? "id " + job_id
          : is_loopback_name(master_addr) ? "localhost"
                                          : "at " + master_addr;
  const wire::JobId digest = job_id_of(what);
  return "@distrain-" + hex({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

uint16_t port_of_job(const std::string& job_id) {
  const wire::JobId digest = job_id_of(job_id);
  return static_cast<uint16_t>(kFirstPort + (digest[0] * 256 + digest[1]) % kPorts);
}

net::Fd listen_as_rank_0(const std::string& listen_addr, const std::string& master_addr,
                         uint16_t port, net::PortRange ports) {
  const std::string host =
      listen_addr.empty() ? std::move(net::host_to_bind(master_addr).value()) : listen_addr;
  auto socket = net::listen_tcp(host, port == 0 ? ports : net::PortRange{port, port});
  if (!socket.ok() && port != 0 && socket.error().kind == base::ErrorKind::kRendezvous) {
    base::Error error = socket.error();
    error.message += ": --master-port or --job-id give each job on a host a port of its own";
    throw base::Exception(std::move(error));
  }
  return std::move(socket.value());
}

std::string new_token() {
  std::string token = random_bytes(32);
  static_cast<void>(authenticate(derive_key(token, "set up"), {}));
  return token;
}

std::string new_unix_name() { return "@distrain-" + hex(random_bytes(16)); }

Slot::Slot(Options options) : options_(std::move(options)) {
  options_.rank = kUnassignedRank;
  control_ = std::make_shared<ControlPlane>(loop_, options_, ControlPlane::Callbacks{});
}

Slot::~Slot() { control_->close(); }
int Slot::reserve() { return control_->reserve_rank(); }

std::vector<Wait> Slot::waits() const {
  const auto wait = control_->wait();
  if (!wait) return {};
  return {{"a rank that nobody else is", wait->since}};
}

}  // namespace distrain::membership
