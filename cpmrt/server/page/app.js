// The page: its parts, and what happens between them.

import { fetchModel } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Settings } from "./settings.js";
import { openStore } from "./storage.js";
import { Composer } from "./views/composer.js";
import { MessagesView } from "./views/messages_view.js";
import { SettingsDialog } from "./views/settings_dialog.js";
import { Sidebar } from "./views/sidebar.js";
import { SidebarDrawer } from "./views/sidebar_drawer.js";
import { Toast } from "./views/toast.js";
import { showExamples, showModel } from "./views/welcome.js";

const LONGEST_ANNOUNCEMENT = 3000;

const settings = new Settings();
const store = await openStore();
const toast = new Toast(byId("toast"));
const drawer = new SidebarDrawer(byId("sidebar"), byId("shade"), byId("open-sidebar"), byId("close-sidebar"));

const view = {
  showConversation(conversation, generation) {
    const isEmpty = !conversation.messages.length;
    byId("welcome").hidden = !isEmpty;
    byId("messages").hidden = isEmpty;
    byId("title").textContent = conversation.title || "New chat";
    document.title = conversation.title || chat.model?.id || "cpmrt";
    history.replaceState(null, "", isEmpty ? location.pathname : `#${conversation.id}`);
    messages.show(conversation, generation);
    messages.scrollToEnd();
    showWriting(Boolean(generation));
    if (document.activeElement === document.body) composer.focus();
    announce(generation ? "The answer is being written." : "");
  },
  showList(heads, current, writing) {
    sidebar.show(heads, current, writing);
    byId("save-all").disabled = !heads.length;
    const title = heads.find(head => head.id === current)?.title;
    if (title) byId("title").textContent = title;
  },
  updateAnswer: () => messages.update(),
  showProblem: text => toast.show(text),
  endAnswer(generation) {
    messages.end();
    showWriting(false);
    const { content, problem } = generation.answer;
    announce(problem ?? content.slice(0, LONGEST_ANNOUNCEMENT));
    if (generation.errorCode === "invalid_api_key") dialog.open(chat.conversation.system, true);
  },
};

const messages = new MessagesView(byId("scroller"), byId("messages"), byId("to-end"), {
  edit: (message, text) => chat.edit(message, text),
  regenerate: message => chat.regenerate(message),
  select: message => chat.select(message),
});
const sidebar = new Sidebar(byId("conversations"), {
  open(id) {
    drawer.closeOnPhone();
    chat.open(id);
    composer.focus();
  },
  rename: (id, title) => chat.rename(id, title),
  save: id => chat.save(id),
  async remove(id) {
    const putBack = await chat.remove(id);
    toast.show("The conversation is deleted.", { label: "Undo", run: putBack });
  },
});
const composer = new Composer(
  { form: byId("ask"), box: byId("question"), send: byId("send"), stop: byId("stop") },
  {
    ask: text => chat.ask(text),
    stop: () => chat.stop(),
    editLast: () => [...document.querySelectorAll(".message.user .edit")].at(-1)?.click(),
  },
);
const chat = new Chat({ store, settings, view, channel: new BroadcastChannel("cpmrt") });
const dialog = new SettingsDialog(
  {
    dialog: byId("settings"),
    form: byId("settings-form"),
    numbers: byId("numbers"),
    source: byId("sampling-source"),
    system: byId("system"),
    thinking: byId("thinking"),
    key: byId("key"),
    reset: byId("reset"),
  },
  settings,
  { onChange: system => chat.setSystem(system), onKey: loadModel },
);

function showWriting(isWriting) {
  composer.setWriting(isWriting);
  byId("messages").classList.toggle("writing", isWriting);
}

/** Let screen readers say something once. What is written piece by piece is not read piece by piece. */
function announce(text) {
  byId("announcement").textContent = text;
}

async function loadModel() {
  let problem = "";
  try {
    chat.model = await fetchModel(settings.key);
    dialog.setDefaults(chat.model.sampling_defaults);
    byId("model").textContent = chat.model.id;
    if (!chat.conversation.title) document.title = chat.model.id;
  } catch (error) {
    chat.model = null;
    problem = error.message;
    if (error.code === "invalid_api_key") dialog.open(chat.conversation.system, true);
  }
  showModel(byId("facts"), chat.model, problem);
}

function fresh() {
  drawer.closeOnPhone();
  chat.fresh();
  composer.focus();
}

async function loadFile(input) {
  try {
    const count = await chat.load(input.files[0]);
    toast.show(count === 1 ? "One conversation is imported." : `${count} conversations are imported.`);
  } catch (error) {
    toast.show(error.message);
  }
  input.value = "";
}

byId("fresh").addEventListener("click", fresh);
byId("open-settings").addEventListener("click", () => dialog.open(chat.conversation.system));
byId("save-all").addEventListener("click", () => chat.saveAll());
byId("load").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", event => loadFile(event.target));
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !byId("settings").open) chat.stop();
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    fresh();
  }
});
addEventListener("pagehide", () => chat.saveWriting());
showExamples(byId("examples"), text => chat.ask(text));
if (!store.isKept) toast.show("This browser keeps nothing for this page: conversations last until it is closed.");
await Promise.all([chat.begin(location.hash.slice(1)), loadModel()]);
composer.focus();
