// The client's own version, that of the project.
#pragma once

namespace kvharbor::detail {

inline constexpr const char* kVersion = KVHARBOR_VERSION;

}  // namespace kvharbor::detail
