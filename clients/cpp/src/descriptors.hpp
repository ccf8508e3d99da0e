// Layouts and descriptors, to and from their messages.
#pragma once

#include "kvharbor/layout.hpp"
#include "kvharbor/v1/types.pb.h"

namespace kvharbor::detail {

v1::Layout message_of(const Layout& layout);
// Throws ServiceBug unless every page that the descriptor names lies within its size.
Descriptor descriptor_of(const v1::PoolDescriptor& message);

}  // namespace kvharbor::detail
