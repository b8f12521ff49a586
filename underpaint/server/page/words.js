// All words of the page, in English and Chinese.

const WORDS = {
  en: {
    otherLanguage: "中文", paint: "Paint", chat: "Chat", prompt: "Prompt",
    promptHint: "What to paint, or how to edit the references", references: "Reference pictures",
    addPictures: "Add pictures", dropHint: "or drop or paste them here", size: "Size", width: "Width", height: "Height",
    number: "Pictures", steps: "Steps", seed: "Seed", random: "random", guidance: "Guidance", standard: "default",
    negative: "Negative prompt", go: "Paint", cancel: "Cancel", pictures: "Pictures", empty: "Nothing is painted yet.",
    auto: "automatic", custom: "other …", waiting: "waiting", step: "step {0} of {1}", decoding: "finishing",
    use: "Use as reference", repeat: "Repeat with this seed", save: "Save", remove: "Remove picture {0}",
    seedIs: "seed {0}", preview: "Preview of picture {0}", picture: "Picture: {0}", cancelled: "Cancelled.",
    tooMany: "At most {0} references.", lost: "The server cannot be reached.", askKey: "API key of this server:",
    message: "Message", messageHint: "Say something", mayPaint: "may paint", newChat: "New chat", send: "Send",
    notPicture: "{0} is not a picture.", pictureInChat: "Picture",
    silence: "Ask about pictures, or say what to paint.",
  },
  zh: {
    otherLanguage: "English", paint: "绘画", chat: "对话", prompt: "提示词",
    promptHint: "画什么，或如何修改参考图", references: "参考图",
    addPictures: "添加图片", dropHint: "也可以拖放或粘贴到这里", size: "尺寸", width: "宽", height: "高",
    number: "张数", steps: "步数", seed: "种子", random: "随机", guidance: "引导强度", standard: "默认",
    negative: "负面提示词", go: "开始绘画", cancel: "取消", pictures: "作品", empty: "还没有作品。",
    auto: "自动", custom: "其他…", waiting: "排队中", step: "第 {0} / {1} 步", decoding: "即将完成",
    use: "用作参考图", repeat: "用此种子重画", save: "保存", remove: "移除图片 {0}",
    seedIs: "种子 {0}", preview: "图片 {0} 预览", picture: "图片：{0}", cancelled: "已取消。",
    tooMany: "最多 {0} 张参考图。", lost: "无法连接服务器。", askKey: "此服务器的 API 密钥：",
    message: "消息", messageHint: "说点什么", mayPaint: "可以绘画", newChat: "新对话", send: "发送",
    notPicture: "{0} 不是图片。", pictureInChat: "图片",
    silence: "可以询问图片内容，也可以说想画什么。",
  },
};

let language = localStorage.getItem("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");

/** The word of this name, its {0}, {1} filled in. */
export function word(name, ...values) {
  return values.reduce((text, value, i) => text.replace(`{${i}}`, value), WORDS[language][name]);
}

/** An element whose word changes with the language. */
export function spoken(tag, name, ...values) {
  const element = Object.assign(document.createElement(tag), { textContent: word(name, ...values) });
  element.dataset.word = name;
  element.dataset.values = JSON.stringify(values);
  if (tag === "button") element.type = "button";
  return element;
}

/** Write every word of the page, those within `root` only if it is given. */
export function translate(root = document) {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const element of root.querySelectorAll("[data-word]")) {
    element.textContent = word(element.dataset.word, ...JSON.parse(element.dataset.values ?? "[]"));
  }
  for (const element of root.querySelectorAll("[data-hint]")) element.placeholder = word(element.dataset.hint);
}

export function switchLanguage() {
  language = language === "en" ? "zh" : "en";
  localStorage.setItem("language", language);
  translate();
}
