#include "pool_memory.hpp"

#include <utility>

#include "device_mapping.hpp"
#include "kvharbor/errors.hpp"

namespace kvharbor::detail {
namespace {

SideAnswer asked(Link& link, v1::SideRequest request) {
  try {
    return link.ask_side(request);
  } catch (const DeviceNotVisible&) {
    *request.mutable_attach()->mutable_device_view() = device_view();
  }
  return link.ask_side(request);
}

}  // namespace

std::shared_ptr<const Mapped> attach(Link& link, const std::string& pool_id, int part) {
  v1::SideRequest request;
  request.mutable_attach()->set_pool_id(pool_id);
  request.mutable_attach()->set_part(part);
  const SideAnswer answer = asked(link, std::move(request));
  if (!answer.message.has_attached()) {
    throw ServiceBug({"", "the service answered an attach with something else than memory", {}});
  }
  return map_attached(answer.message.attached(), answer.descriptors, link.writable());
}

}  // namespace kvharbor::detail
