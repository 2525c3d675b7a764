// The type behind llmc_device*.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/registry.h"

struct llmc_device {
  std::unique_ptr<llmc::OpenDevice> device;
  std::vector<std::pair<std::string, std::string>> facts;
};
