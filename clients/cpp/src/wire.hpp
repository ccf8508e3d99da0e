// One gRPC channel to one process of the service, with the session that it speaks for.
#pragma once

#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

#include "clock.hpp"
#include "kvharbor/v1/cache_service.grpc.pb.h"
#include "kvharbor/v1/pool_service.grpc.pb.h"

namespace kvharbor::detail {

class Wire {
 public:
  Wire(const std::string& target, std::string session_token);

  // Sets deadline and session of a call.
  void prepare(grpc::ClientContext& context, Deadline until) const;

  const std::unique_ptr<v1::CacheService::Stub> cache;
  const std::unique_ptr<v1::PoolService::Stub> pools;

 private:
  explicit Wire(const std::shared_ptr<grpc::Channel>& channel, std::string session_token);

  std::string session_token_;
};

}  // namespace kvharbor::detail
