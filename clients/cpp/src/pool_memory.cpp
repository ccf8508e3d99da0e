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

SideAnswer attached(Link& link, const std::string& pool_id, int part) {
  v1::SideRequest request;
  request.mutable_attach()->set_pool_id(pool_id);
  request.mutable_attach()->set_part(part);
  SideAnswer answer = asked(link, std::move(request));
  if (!answer.message.has_attached()) {
    throw ServiceBug({"", "the service answered an attach with something else than memory", {}});
  }
  return answer;
}

std::shared_ptr<const Mapped> mapped(const Link& link, const SideAnswer& answer) {
  return map_attached(answer.message.attached(), answer.descriptors, link.writable());
}

bool concerns_part(const InvalidField& refused) {
  const auto field = refused.metadata().find("field");
  return field != refused.metadata().end() && field->second == "part";
}

}  // namespace

std::shared_ptr<const Mapped> attach(Link& link, const std::string& pool_id, int part) {
  return mapped(link, attached(link, pool_id, part));
}

std::shared_ptr<const Mapped> attach_of_rank(Link& link, const std::string& pool_id) {
  try {
    return attach(link, pool_id, link.rank());
  } catch (const InvalidField& refused) {
    if (link.rank() == 0 || !concerns_part(refused)) throw;
    const SideAnswer answer = attached(link, pool_id, 0);
    if (answer.message.attached().pool().layout().tp_size() > 1) throw;
    return mapped(link, answer);
  }
}

}  // namespace kvharbor::detail
