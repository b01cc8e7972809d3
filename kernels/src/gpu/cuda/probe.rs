//! Describes a device without taking any of its memory.

use super::failure::failure;
use super::{bind, modules};
use crate::gpu::{GpuSensor, Properties};
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::cublaslt::sys::cublasLtGetVersion;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice, CUdevice_attribute as Attribute, cuDriverGetVersion,
};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result};

/// The CUDA version that a driver must support: the one that this is compiled against, 13.0.
const NEEDED: i32 = 13_000;

/// The properties of the device with this number.
///
/// # Errors
/// [`Error::NoDevice`] says which driver, library or device is missing, or that it is too old.
pub fn probe(ordinal: usize) -> Result<Properties> {
    bind::bind().map_err(Error::NoDevice)?;
    // The version is asked for first, which needs neither a device nor an initialised driver: an
    // old driver would only answer that it cannot be initialised.
    let version = driver_version().map_err(silent)?;
    if version < NEEDED {
        let known =
            format!("the NVIDIA driver knows CUDA {}, and this build needs 13.0", dotted(version));
        return Err(Error::NoDevice(format!("{known}: install driver 580 or newer")));
    }
    result::init().map_err(silent)?;
    let count = result::device::get_count().map_err(failure("probe"))?;
    if ordinal >= count.max(0) as usize {
        return Err(Error::NoDevice(format!(
            "cuda:{ordinal} is not among the {count} GPUs that the driver finds"
        )));
    }
    let found = describe(ordinal, version).map_err(failure("probe"))?;
    found.check_architecture()?;
    Ok(found)
}

/// Bytes of the device's memory that are free. It takes a context of the driver, and gives it back.
///
/// # Errors
/// When there is no such device, or it does not answer.
pub fn free_memory(ordinal: usize) -> Result<usize> {
    bind::bind().map_err(Error::NoDevice)?;
    let context = CudaContext::new(ordinal).map_err(failure("memory"))?;
    context.mem_get_info().map(|(free, _)| free).map_err(failure("memory"))
}

/// What reads the condition of the device with this number.
///
/// # Errors
/// A sentence that says why nothing is known of it.
pub fn sensor(ordinal: usize) -> Result<GpuSensor, String> {
    probe(ordinal).map_err(|why| why.to_string())?;
    let place = || -> Result<String, DriverError> {
        let device = result::device::get(ordinal as i32)?;
        let part = |name| attribute(device, name);
        let domain = part(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = part(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let slot = part(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        Ok(format!("{domain:08x}:{bus:02x}:{slot:02x}.0"))
    };
    let place = place().map_err(|why| failure("probe")(why).to_string())?;
    bind::nvml()?.sensor(&place)
}

fn silent(error: DriverError) -> Error {
    Error::NoDevice(format!("the NVIDIA driver finds none ({:?}): see `nvidia-smi`", error.0))
}

fn describe(ordinal: usize, version: i32) -> Result<Properties, DriverError> {
    let device = result::device::get(ordinal as i32)?;
    // SAFETY: the function has no preconditions.
    let library = unsafe { cublasLtGetVersion() };
    let capability = (
        attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok(Properties {
        name: result::device::get_name(device)?,
        capability,
        multiprocessors: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(
            device,
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?,
        // SAFETY: the driver gave the handle.
        memory_bytes: unsafe { result::device::total_mem(device) }?,
        versions: format!("driver {}CUDA {} cuBLASLt {library}", release(), dotted(version)),
        warp_groups: capability == (9, 0) && modules::WARP_GROUPS,
    })
}

fn attribute(device: CUdevice, name: Attribute) -> Result<u32, DriverError> {
    // SAFETY: the driver gave the handle.
    unsafe { result::device::get_attribute(device, name) }.map(i32::cast_unsigned)
}

fn driver_version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: it writes one integer.
    unsafe { cuDriverGetVersion(&raw mut version) }.result()?;
    Ok(version)
}

fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The driver's release followed by a space, as in `580.82.07 `; empty if the kernel module does
/// not tell it.
fn release() -> String {
    let text = std::fs::read_to_string("/sys/module/nvidia/version");
    text.map_or_else(|_| String::new(), |text| format!("{} ", text.trim()))
}
