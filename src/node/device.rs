//! The devices that models run on: what the configuration asks for, and what this machine and this
//! build have.

use super::NodeError;
use crate::config::cache_dir;
use cresset_engine::DeviceSetting;
use cresset_engine::EngineError;
use cresset_engine::EngineSettings;
use cresset_kernels::gpu::{self, Gpu, GpuSensor, ProductChoices, Properties};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The setting that names several devices.
const DEVICES: &str = "engine.devices";

/// The device that models run on. It is decided once, at the start, and handed down: a second look
/// at the machine could find another one.
#[derive(Clone, Debug)]
pub enum ComputeDevice {
    Cpu {
        /// The reason why no GPU is used, when this build supports GPUs and the configuration
        /// would have taken one.
        no_gpu: Option<String>,
    },
    Gpu {
        number: usize,
        /// The numbers of further GPUs, of the same kind, which compute each model together with
        /// it.
        further: Vec<usize>,
        properties: Properties,
    },
}

impl ComputeDevice {
    /// The device that models are qualified on, and the further ones of `engine.devices`. Fails
    /// when the configuration names a GPU that cannot be used, or devices that do not go together.
    pub fn choose_all(engine: &EngineSettings) -> Result<(Self, Vec<Self>), NodeError> {
        let least_free_mib = engine.gpu_least_free_mib;
        check_groups(engine)?;
        let [first, further @ ..] = &engine.devices[..] else {
            return Ok((Self::choose(engine.device, "engine.device", least_free_mib)?, Vec::new()));
        };
        check_together(&engine.devices, engine.device)?;
        let choose = |wanted: &DeviceSetting| Self::choose(*wanted, DEVICES, 0);
        let (first, further) =
            (choose(first)?, further.iter().map(choose).collect::<Result<Vec<_>, _>>()?);
        further.iter().try_for_each(|other| check_alike(&first, other))?;
        Ok(in_groups(first, further, engine.tensor_parallel))
    }

    fn choose(
        wanted: DeviceSetting,
        setting: &str,
        least_free_mib: usize,
    ) -> Result<Self, NodeError> {
        match wanted {
            DeviceSetting::Cpu => Ok(Self::Cpu { no_gpu: None }),
            DeviceSetting::Auto => Ok(Self::automatic(least_free_mib)),
            DeviceSetting::Cuda(number) => match gpu::probe(number) {
                Ok(properties) => Ok(Self::Gpu { number, further: Vec::new(), properties }),
                Err(why) => {
                    let what = format!("{setting} names cuda:{number}, but {why}");
                    Err(NodeError::new(what).remedy(match setting {
                        DEVICES => format!("or take cuda:{number} out of {DEVICES}"),
                        _ => format!("or set {setting} to \"cpu\""),
                    }))
                }
            },
        }
    }

    /// The first GPU, if it can be used and at least `least_free_mib` of its memory is free.
    fn automatic(least_free_mib: usize) -> Self {
        let found = gpu::probe(0).map_err(|why| why.to_string()).and_then(|properties| {
            let free = gpu::free_memory(0).map_err(|why| why.to_string())?;
            enough_memory(&properties, free, least_free_mib)?;
            Ok(properties)
        });
        match found {
            Ok(properties) => Self::Gpu { number: 0, further: Vec::new(), properties },
            Err(why) => Self::Cpu { no_gpu: gpu::BUILT.then_some(why) },
        }
    }

    /// The GPU's number, the first one's of several; `None` on the CPU.
    pub fn number(&self) -> Option<usize> {
        self.numbers().first().copied()
    }

    /// The numbers of all its GPUs; none on the CPU.
    fn numbers(&self) -> Vec<usize> {
        match self {
            Self::Cpu { .. } => Vec::new(),
            Self::Gpu { number, further, .. } => [&[*number], &further[..]].concat(),
        }
    }

    /// The name of the GPU, or the names of all that compute together; `None` on the CPU.
    pub fn name(&self) -> Option<String> {
        let names: Vec<_> = self.numbers().iter().map(|number| format!("cuda:{number}")).collect();
        (!names.is_empty()).then(|| names.join("+"))
    }

    /// The GPU's properties; `None` on the CPU.
    pub fn properties(&self) -> Option<&Properties> {
        match self {
            Self::Cpu { .. } => None,
            Self::Gpu { properties, .. } => Some(properties),
        }
    }

    /// The algorithms of products that versions before 0.3.0 kept in the user's cache folder; none
    /// on the CPU.
    pub(crate) fn cached_products(&self) -> ProductChoices {
        let found = ProductChoices::default();
        if let Some(properties) = self.properties() {
            found.read_from(&cache_dir(), properties);
        }
        found
    }

    /// Each GPU's name, with what reads its condition or why nothing is known of that.
    pub fn sensors(&self) -> Vec<(String, Result<GpuSensor, String>)> {
        let named = |number: &usize| (format!("cuda:{number}"), gpu::sensor(*number));
        self.numbers().iter().map(named).collect()
    }

    /// The GPUs, ready for work with these algorithms; none on the CPU.
    pub fn open(&self, products: ProductChoices) -> Result<Vec<Arc<dyn Gpu>>, EngineError> {
        let options = gpu::DeviceOptions { products, ..gpu::DeviceOptions::default() };
        let opened = match self.numbers()[..] {
            [] => return Ok(Vec::new()),
            [number] => gpu::open_with(number, &options).map(|gpu| vec![gpu]),
            ref several => gpu::open_group(several, &options),
        };
        opened.map_err(|error| EngineError::NotLoaded(error.to_string()))
    }

    /// One sentence for people that follows "models run". `None` on the CPU of a machine or a
    /// build from which no GPU was expected.
    pub fn sentence(&self) -> Option<String> {
        match self {
            Self::Cpu { no_gpu } => no_gpu.as_ref().map(|why| format!("on the CPU: {why}")),
            Self::Gpu { further, properties, .. } => {
                let Properties { name, capability: (major, minor), memory_bytes, versions, .. } =
                    properties;
                let mib = memory_bytes >> 20;
                let together = if further.is_empty() { "" } else { " together, each" };
                Some(format!(
                    "on {}{together}: {name}, sm_{major}{minor}, {mib} MiB, {versions}",
                    self.name().unwrap_or_default()
                ))
            }
        }
    }
}

/// Refuses a number of GPUs that cannot compute models together, whatever this machine has.
fn check_groups(engine: &EngineSettings) -> Result<(), NodeError> {
    let (count, devices) = (engine.tensor_parallel, &engine.devices);
    if count == 1 {
        return Ok(());
    }
    let is_gpu = |device: &DeviceSetting| matches!(device, DeviceSetting::Cuda(_));
    let why = if devices.is_empty() || !devices.iter().all(is_gpu) {
        "needs engine.devices to name the GPUs; the CPU computes models by itself".to_owned()
    } else if !devices.len().is_multiple_of(count) {
        format!("needs a multiple of {count} GPUs in engine.devices, which names {}", devices.len())
    } else if engine.gpu_kv_mib > 0 {
        // Exchanges of two models between the same GPUs could wait for each other.
        "computes one model at a time: leave engine.gpu_kv_mib at 0".to_owned()
    } else {
        return Ok(());
    };
    Err(NodeError::new(format!("engine.tensor_parallel = {count} {why}")))
}

/// Makes one device of each `count` neighbouring ones.
fn in_groups(
    first: ComputeDevice,
    further: Vec<ComputeDevice>,
    count: usize,
) -> (ComputeDevice, Vec<ComputeDevice>) {
    let all: Vec<_> = std::iter::once(first).chain(further).collect();
    let group = |devices: &[ComputeDevice]| {
        let mut whole = devices[0].clone();
        if let ComputeDevice::Gpu { further, .. } = &mut whole {
            *further = devices[1..].iter().filter_map(ComputeDevice::number).collect();
        }
        whole
    };
    let mut groups: Vec<_> = all.chunks(count).map(group).collect();
    (groups.remove(0), groups)
}

/// Refuses devices that a node cannot run models on together, whatever this machine has.
fn check_together(devices: &[DeviceSetting], device: DeviceSetting) -> Result<(), NodeError> {
    let refuse = |why: &str| Err(NodeError::new(format!("{DEVICES} {why}")));
    let is_cpu = |device: &DeviceSetting| *device == DeviceSetting::Cpu;
    let cpus = devices.iter().filter(|device| is_cpu(device)).count();
    let named: BTreeSet<String> = devices.iter().map(|device| (*device).into()).collect();
    if device != DeviceSetting::Auto {
        return refuse("and engine.device are both set: set one of them");
    }
    if devices.contains(&DeviceSetting::Auto) {
        return refuse("must name its devices: leave \"auto\" out");
    }
    if cpus > 0 && cpus < devices.len() {
        return refuse("must be GPUs or the CPU, not both: what is proven on one is not on others");
    }
    if cpus == 0 && named.len() < devices.len() {
        return refuse("names a GPU twice: name each once");
    }
    Ok(())
}

/// Refuses GPUs of two kinds: a model is proven on one kind.
fn check_alike(first: &ComputeDevice, other: &ComputeDevice) -> Result<(), NodeError> {
    let kind = |device: &ComputeDevice| {
        let found = device.properties().map(|found| {
            (found.name.clone(), found.capability, found.multiprocessors, found.memory_bytes >> 30)
        });
        (found, device.sentence().unwrap_or_default())
    };
    let ((first, first_told), (other, other_told)) = (kind(first), kind(other));
    if first == other {
        return Ok(());
    }
    let what = "engine.devices must be GPUs of one kind, as models are proven on one kind";
    Err(NodeError::new(format!("{what}; they are {first_told}, and {other_told}"))
        .remedy("run a node for each kind"))
}

/// Checks whether a GPU has enough memory to be taken without being named. `free` is in bytes. The
/// error says in one sentence why not.
fn enough_memory(gpu: &Properties, free: usize, least_free_mib: usize) -> Result<(), String> {
    let (name, least) = (&gpu.name, least_free_mib << 20);
    let asked = format!("where engine.gpu_least_free_mib asks for {least_free_mib}");
    let [all, free_mib] = [gpu.memory_bytes, free].map(|bytes| bytes >> 20);
    if gpu.memory_bytes < least {
        return Err(format!("{name} is too small: it has {all} MiB of memory, {asked}"));
    }
    if free < least {
        let use_it = "close the programs that use it, or set engine.device to \"cuda:0\"";
        return Err(format!(
            "{name} is too full: {free_mib} of its {all} MiB are free, {asked}; {use_it}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_kernels::gpu::Emulator;

    #[test]
    fn devices_that_do_not_go_together_are_refused() {
        use DeviceSetting::{Auto, Cpu, Cuda};
        let check = |devices: &[DeviceSetting], device, expect: Option<&str>| {
            let refused = check_together(devices, device).err().map(|error| error.to_string());
            match (&refused, expect) {
                (None, None) => {}
                (Some(why), Some(part)) => assert!(why.contains(part), "{why}"),
                _ => panic!("{devices:?}: {refused:?}"),
            }
        };
        check(&[Cuda(0), Cuda(1)], Auto, None);
        check(&[Cpu, Cpu], Auto, None);
        check(&[Cuda(0), Cuda(1)], Cuda(0), Some("both set"));
        check(&[Cuda(0), Auto], Auto, Some("\"auto\""));
        check(&[Cuda(0), Cpu], Auto, Some("not both"));
        check(&[Cuda(1), Cuda(0), Cuda(1)], Auto, Some("twice"));
        let gpu = |name, number| {
            let properties = Emulator::card(name, 12_000 << 20).unwrap();
            let properties = Properties { name: name.to_owned(), ..properties };
            ComputeDevice::Gpu { number, further: Vec::new(), properties }
        };
        assert!(check_alike(&gpu("rtx-3060", 0), &gpu("rtx-3060", 1)).is_ok());
        let why = check_alike(&gpu("rtx-3060", 0), &gpu("rtx-5090", 1)).unwrap_err().to_string();
        for part in ["of one kind", "cuda:0: rtx-3060", "cuda:1: rtx-5090"] {
            assert!(why.contains(part), "{part} is not in {why}");
        }
    }

    #[test]
    fn gpus_compute_together_in_whole_groups() {
        use DeviceSetting::{Cpu, Cuda};
        let check = |count, devices: &[DeviceSetting], gpu_kv_mib, expect: Option<&str>| {
            let devices = devices.to_vec();
            let engine = EngineSettings {
                devices,
                tensor_parallel: count,
                gpu_kv_mib,
                ..EngineSettings::default()
            };
            match (check_groups(&engine), expect) {
                (Ok(()), None) => {}
                (Err(why), Some(part)) => assert!(why.message.contains(part), "{}", why.message),
                (found, _) => panic!("{found:?}"),
            }
        };
        check(1, &[], 300, None);
        check(2, &[Cuda(0), Cuda(1)], 0, None);
        check(2, &[], 0, Some("engine.tensor_parallel = 2 needs engine.devices to name the GPUs"));
        check(2, &[Cpu, Cpu], 0, Some("the CPU computes models by itself"));
        check(2, &[Cuda(0), Cuda(1), Cuda(2)], 0, Some("a multiple of 2 GPUs"));
        check(4, &[Cuda(0), Cuda(1)], 0, Some("a multiple of 4 GPUs"));
        check(2, &[Cuda(0), Cuda(1)], 300, Some("leave engine.gpu_kv_mib at 0"));

        let properties = Emulator::card("rtx-3060", 12_000 << 20).unwrap();
        let gpu = |number| ComputeDevice::Gpu {
            number,
            further: Vec::new(),
            properties: properties.clone(),
        };
        let (first, further) = in_groups(gpu(3), vec![gpu(0), gpu(1), gpu(2)], 2);
        assert_eq!(first.name().as_deref(), Some("cuda:3+cuda:0"));
        let names: Vec<_> = further.iter().map(ComputeDevice::name).collect();
        assert_eq!(names, [Some("cuda:1+cuda:2".to_owned())]);
        let told = first.sentence().unwrap();
        assert!(told.starts_with("on cuda:3+cuda:0 together, each: emulator"), "{told}");
        let (first, further) = in_groups(gpu(0), vec![gpu(1)], 1);
        assert_eq!((first.name().as_deref(), further.len()), (Some("cuda:0"), 1));
    }

    /// No machine has GPUs of these numbers.
    #[test]
    fn a_gpu_that_cannot_be_used_is_told_with_the_setting_that_names_it() {
        use DeviceSetting::{Auto, Cuda};
        let check = |device, devices: &[DeviceSetting], setting: &str, remedy: &str| {
            let devices = devices.to_vec();
            let engine = EngineSettings { device, devices, ..EngineSettings::default() };
            let error = ComputeDevice::choose_all(&engine).unwrap_err();
            let what = format!("{setting} names cuda:998, but ");
            assert!(error.message.starts_with(&what), "{}", error.message);
            assert_eq!(error.remedy.as_deref(), Some(remedy));
        };
        check(Cuda(998), &[], "engine.device", "or set engine.device to \"cpu\"");
        let remedy = "or take cuda:998 out of engine.devices";
        check(Auto, &[Cuda(998), Cuda(999)], "engine.devices", remedy);
    }

    #[test]
    fn a_gpu_that_is_too_small_or_too_full_is_told_in_one_sentence() {
        let check = |all_mib: usize, free_mib: usize, expect: Result<(), &str>| {
            let gpu = Emulator::card("rtx-3060", all_mib << 20).unwrap();
            let found = enough_memory(&gpu, free_mib << 20, 2048);
            assert_eq!(found.as_ref().map_err(String::as_str).copied(), expect, "{all_mib}");
        };
        check(12_288, 9_000, Ok(()));
        check(12_288, 2_048, Ok(()));
        check(
            12_288,
            2_047,
            Err("emulator is too full: 2047 of its 12288 MiB are free, where \
                 engine.gpu_least_free_mib asks for 2048; close the programs that use it, or set \
                 engine.device to \"cuda:0\""),
        );
        check(
            1_024,
            1_024,
            Err("emulator is too small: it has 1024 MiB of memory, where \
                 engine.gpu_least_free_mib asks for 2048"),
        );
    }
}
