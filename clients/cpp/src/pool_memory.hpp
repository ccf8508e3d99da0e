// Asking for a pool's memory.
#pragma once

#include <memory>
#include <string>

#include "link.hpp"
#include "mapping.hpp"

namespace kvharbor::detail {

// Asks on the side socket for a part of a pool and maps it. Only where that is refused for want of a view of devices is
// the driver asked for one. Throws as Pool::attach.
std::shared_ptr<const Mapped> attach(Link& link, const std::string& pool_id, int part);
// As `attach`, of the part of the link's rank, or the one part of a pool whose layout has no ranks. Throws InvalidField
// for a rank that a layout with ranks has not: the part of another must not be written over.
std::shared_ptr<const Mapped> attach_of_rank(Link& link, const std::string& pool_id);

}  // namespace kvharbor::detail
